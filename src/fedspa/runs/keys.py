"""What each key of a config means, in a sentence: the reference is made from these and from the types in config.py."""

from __future__ import annotations

MEANING = {
    "federation.agents": "How many agents hold records (n).",
    "federation.rounds": "How many rounds (T).",
    "federation.per_round": "How many agents train in a round.",
    "federation.participation": "`balanced` deals agents out in shuffled turns, so that nobody takes part oftener than "
    "⌈rounds·per_round/agents⌉ times; `uniform` draws them afresh each round (the paper) and skips those at the cap.",
    "federation.cap": "The most rounds an agent may take part in; the noise is calibrated to it. Unset, it "
    "is what `participation` allows: ⌈rounds·per_round/agents⌉, or all rounds under `uniform`.",
    "data.name": "`digits` (in scikit-learn), `mnist`, `cifar10`, a path to an `.npz` with x_train, y_train, x_test "
    "and y_test, or `package.module:function`.",
    "data.dir": "The folder of the files of `mnist`, `cifar10` or an `.npz`.",
    "data.features": "Each image as features that no data was needed for: `aligned` (moved, sized and sheared to a "
    "standard by its own moments; one channel), `orientations` (histograms of gradient directions), or both, "
    "`aligned-orientations`, for handwriting.",
    "data.holdout": "The share of the training records that no agent gets, and that accuracy is measured on in "
    "place of the test records: for choosing settings.",
    "data.partition": "How records are dealt out: `iid`, `dirichlet` (label skew, see `alpha`), `shards` (few labels "
    "an agent).",
    "data.alpha": "Concentration of `dirichlet`: small is skewed, large is nearly iid.",
    "model.name": "`logistic`, `mlp`, `small-cnn`, `mnist-cnn`, `cifar10-cnn`, or `package.module:function`.",
    "algorithm.name": "`fedspa`, and its rivals: `fedavg` (no privacy), `dp-fed` (every coordinate), `cpsgd` "
    "(whole numbers with Binomial noise).",
    "algorithm.compression": "p = k/d, the share of coordinates that an agent trains and uploads in a round. For "
    "`cpsgd` p = log2(m + 2^b)/32: below 1 it decides the trials m.",
    "model.init": "The first parameters: PyTorch's own, drawn from `run.seed` (`default`), or public edge filters and "
    "projections for CNNs (`oriented`).",
    "algorithm.layer_shares": "With mask `fixed` and in place of `compression`: the share of each parameter tensor, in "
    "the model's order, that is ever trained, as in `[0, 1, 0.1, 1]`.",
    "algorithm.mask": "Who shares a mask: nobody (`per-agent`, the paper), a round's agents (`shared`), or everyone "
    "for the whole run (`fixed`).",
    "algorithm.local_steps": "τ, noisy gradient steps that an agent takes in a round.",
    "algorithm.batch": "B, the expected batch of a step. The sampling rate is B over the fewest records of an agent.",
    "algorithm.local_lr": "The step size of an agent.",
    "algorithm.server": "How the server moves the model by the mean update.",
    "algorithm.server_lr": "The step size of the server.",
    "algorithm.beta1": "The server's first moment, for `adam` and `momentum`.",
    "algorithm.beta2": "The server's second moment, for `adam`.",
    "algorithm.kappa": "Added to the root of the second moment, for `adam`.",
    "algorithm.ema": "Weight of the past in an average of the models of all rounds; 0 is none. Evaluated and saved in "
    "place of the last model.",
    "algorithm.lr_decay": "`sqrt` divides the step sizes of agents and server by √round (the paper).",
    "algorithm.coding": "Values on the wire: `f32`, `f16`, or `int`, whose step hides in the noise.",
    "algorithm.bits": "b, for `cpsgd`: gradients are rounded onto 2^b levels.",
    "algorithm.rotation": "For `cpsgd`: rotate gradients by random signs and Hadamard's matrix before rounding.",
    "privacy.epsilon": "ε for each record over the whole run; the noise follows. This or `noise_multiplier`.",
    "privacy.noise_multiplier": "σ in units of √p·G/B (`coordinate`) or C/B (`l2`); ε follows.",
    "privacy.delta": "δ, below 1 over the records of an agent.",
    "privacy.neighbours": "Which data are neighbours: with a record or without it (`add-remove`, for `poisson`), or "
    "with another in its place (`replace-one`).",
    "privacy.sampling": "How a batch is drawn, afresh each step: each record by its own coin, or a fixed number.",
    "privacy.accountant": "What turns noise into ε. `theorem-1` is the paper's, is not sound, and is flagged.",
    "privacy.clip": "`l2` scales an example's gradient to the norm `clip_value`; `coordinate` (the paper) cuts each "
    "coordinate to ± it.",
    "privacy.clip_value": "C for `l2`, c for `coordinate`; the start, under `quantile`.",
    "privacy.clip_rule": "`given`; `quantile` follows a private quantile; `median` reads it off the data and is not "
    "private.",
    "privacy.noise": "`secure` (keyed by the operating system), `exact` (integers, with a proof), `seeded` (from "
    "run.seed: for simulations that are to be repeated to the bit; nothing that comes of it is private).",
    "privacy.trials": "m, for `cpsgd`: Binomial(m, 1/2) noise in each value. This, `epsilon` or `compression`.",
    "privacy.adversary": "For `cpsgd`: ε holds against the server (`local`), or only against one that sees no more "
    "than the sum over all agents (`secure-aggregation`, which is flagged: it is not run here).",
    "run.seed": "Of everything that is drawn but secure noise and sampling.",
    "run.device": "torch's name of a device: `cpu`, `cuda`.",
    "run.engine": "What runs the local steps; `auto` takes the fastest that can.",
    "run.tf32": "TF32 on GPUs, for the stacked engine.",
    "run.threads": "Threads of the native engine: one an agent. They change the time, and not one bit of the result.",
    "run.out": "The run's folder; a new one under runs/ if unset.",
    "run.ledger": "A ledger to go on with, so that runs on the same records add up; a new one in the run's folder if "
    "unset.",
    "run.policy": "A policy (TOML) that every agent enforces.",
    "run.checkpoint_every": "Rounds between two checkpoints.",
    "run.keep": "Checkpoints that are kept.",
    "run.track": "Also log every round for TensorBoard, or to MLflow (where MLFLOW_TRACKING_URI says, or into the "
    "run's folder); an extra of the same name.",
}
