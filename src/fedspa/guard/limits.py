"""An agent's policy, held against an event that somebody else's training announced.

Of foreign training nothing is known but its events. It releases whole models, clipped by a norm that was given: that is
what the policy's limits on uploads and clipping are asked about.
"""

from __future__ import annotations

from fedspa.agent.policy import Policy, PolicyRefusal
from fedspa.mechanisms.gaussian.event import GaussianEvent
from fedspa.privacy.event import Event


def check(policy: Policy, event: Event, participations: int) -> None:
    """Raise a PolicyRefusal where so many participations in one run are laxer than the policy, its budget aside."""
    if policy.unit is not None and event.unit != policy.unit:
        raise PolicyRefusal("unit", f"the event protects each {event.unit}, this policy asks for each {policy.unit}")
    if not isinstance(event, GaussianEvent):
        raise PolicyRefusal("noise-too-small", f"no noise multiplier is known of {event}")
    if event.noise_multiplier < policy.min_noise_multiplier:
        raise PolicyRefusal(
            "noise-too-small", f"noise multiplier {event.noise_multiplier:g}, at least {policy.min_noise_multiplier:g}"
        )
    if event.steps > policy.max_local_steps:
        raise PolicyRefusal("too-many-steps", f"{event.steps} steps in an entry, at most {policy.max_local_steps}")
    if participations > policy.max_rounds:
        raise PolicyRefusal("too-many-rounds", f"{participations} entries in one run, at most {policy.max_rounds}")
    if policy.max_compression < 1:
        raise PolicyRefusal("compression-too-large", f"a whole model, at most {policy.max_compression:g} of it")
    if "l2" not in policy.clippings:
        raise PolicyRefusal("clipping-not-allowed", f"clipping 'l2', allowed: {', '.join(policy.clippings)}")
    if "given" not in policy.clip_rules:
        raise PolicyRefusal("clip-rule-not-allowed", f"clip rule 'given', allowed: {', '.join(policy.clip_rules)}")
