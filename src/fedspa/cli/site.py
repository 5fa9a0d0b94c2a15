"""`fedspa site`: a site of a federation, from its folder to its node, and its key for secure aggregation."""

from __future__ import annotations

import json
import os
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fedspa.cli.ledger import AsJson
from fedspa.cli.new import NewFolder, fill, whole
from fedspa.errors import ConfigError, printable, quoted, real_path, worded

if TYPE_CHECKING:
    from fedspa.flower.check import Finding

app = typer.Typer(help="A site: make its folder, check it, run its node, see what it spent.", no_args_is_help=True)

Folder = Annotated[Path, typer.Argument(help="The site's folder, which `fedspa site new` made.")]
Format = Annotated[
    Literal["text", "json"],
    typer.Option("--log-format", envvar="FEDSPA_LOG_FORMAT", help="As JSON, a line tells nothing of records."),
]
Out = Annotated[Path | None, typer.Option(help="Write them to this file, whole or not at all, and print nothing.")]


@app.command()
def new(
    folder: NewFolder,
    agent: Annotated[
        str | None, typer.Option(help="The site's name in its ledger: it never changes (the folder's name).")
    ] = None,
    data: Annotated[str, typer.Option(help="Its records: an .npz, a table, or module:function.")] = "records.npz",
    classes: Annotated[int, typer.Option(help="How many classes the run has.")] = 2,
    superlink: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where the server is.")] = "server.example:8443",
    certificate: Annotated[Path | None, typer.Option(help="The server's ca.crt, to copy into the folder.")] = None,
    port: Annotated[
        int, typer.Option(help="For the node's own processes, on this machine only: two nodes need two.")
    ] = 9094,
) -> None:
    """Make a site's folder: site.toml, policy.toml, the node's key, an empty ledger, and a README of four lines.

    The ledger is made here and nowhere else: from then on a missing ledger is an error, never a fresh budget.

    Example: fedspa site new north --superlink server.example:8443
    """
    from fedspa.agent.ledger.ledger import Ledger
    from fedspa.flower.operate import credentials, folders

    name = real_path(folder).name if agent is None else agent
    if not 0 < len(name) <= 200:
        raise ConfigError(f"--agent is {quoted(name)}; it must be a name of 1 to 200 characters")
    for option, value in (("--agent", name), ("--data", data), ("--superlink", superlink)):
        if not value.isprintable() or '"' in value or "\\" in value:
            raise ConfigError(f"{option} is {value!r}; give a text without quotes, backslashes and control characters")
    if not 2 <= classes <= 10**6:
        raise ConfigError(f"--classes is {classes}; it must be a whole number from 2 to 1000000")
    if not 1 <= port <= 65535:
        raise ConfigError(f"--port is {port}; it must be a number from 1 to 65535")
    folders.require_address("--superlink", superlink)
    if certificate is not None:
        credentials.read_certificate(certificate)
    names = {"site.toml": folders.SITE, "site_policy.toml": "policy.toml", "site_README.md": "README.md"}
    values = {"agent": name, "data": data, "classes": str(classes), "superlink": superlink, "port": str(port)}
    with worded(ConfigError, lambda why: f"{folder}: {why}; name a folder that can be written"), whole(folder):
        folders.make(folder)
        fill(folder, names, values)
        (folder / "apps.sha256").write_text("# The apps that were reviewed here: `fedspa site pin` adds a line.\n")
        credentials.make_node_key(folder / "node.key")
        (folder / "ledger").mkdir()
        if certificate is not None:
            shutil.copyfile(certificate, folder / "ca.crt")
        Ledger.open(folder / "ledger" / "ledger.sqlite").close()
    site = folders.read_site(folder)
    print(f"Made the site {site.agent} in {folder}. Its README.md says what comes next; then:\n")
    print(f"    fedspa site check {folder}\n")


@app.command()
def check(
    folder: Folder,
    server: Annotated[bool, typer.Option("--server", help="Also try to reach the server.")] = False,
    as_json: AsJson = False,
) -> None:
    """Look at everything before the site joins: policy, records, ledger, keys, certificate, apps, versions.

    It tells of records, so its output is for the site's own people. Exit code 0: ready; 1: something is to be mended.

    Example: fedspa site check north --server
    """
    require_flower()
    from fedspa.flower.check import examine
    from fedspa.flower.operate.folders import read_site

    site = read_site(folder)
    told(site.agent, examine(site, server=server), as_json)


def require_flower() -> None:
    """An extra that is not there is one line, before anything is done."""
    if find_spec("flwr") is None:
        raise ConfigError("sites and servers run on Flower, which is not installed: pip install 'fedspa[flower]'")


def told(name: str, findings: list[Finding], as_json: bool) -> None:
    """The verdict first, then each finding; exit code 1 where something is to be mended."""
    wrong = sum(finding.works is False for finding in findings)
    if as_json:
        print(json.dumps({"name": name, "ready": not wrong, "findings": [one._asdict() for one in findings]}))
    else:
        _print(f"{name}: ready" if not wrong else f"{name}: NOT ready, {wrong} to mend", findings)
    if wrong:
        raise typer.Exit(1)


def _print(verdict: str, findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    screen, table = Console(highlight=False, markup=False), Table(box=None, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    marks = {True: "yes", False: "NO", None: "–"}
    for finding in findings:
        # As it is: in markup, 'fedspa[flower]' would lose its brackets.
        table.add_row(marks[finding.works], finding.subject, Text(printable(finding.detail)))
    screen.print(verdict)
    screen.print(table)


@app.command()
def pin(
    folder: Folder,
    application: Annotated[Path, typer.Argument(metavar="APP", help="An app's folder, or the .fab of it.")],
) -> None:
    """Allow an app here, by the digest of its bundle. Read it first: its code reads the records.

    A node runs the apps that are pinned and no other, whatever the server sends.

    Example: fedspa site pin north examples/hospital
    """
    require_flower()
    from fedspa.flower.operate.folders import read_site
    from fedspa.flower.supernode import digest_of

    site = read_site(folder)
    digest = digest_of(application)
    if digest not in site.digests():
        with worded(ConfigError, lambda why: f"{site.apps}: {why}"), site.apps.open("a", encoding="utf-8") as file:
            file.write(f"{digest}  {real_path(application).name}\n")
    print(f"{site.agent} runs {application} as it is now:\n{digest}")


@app.command()
def run(
    folder: Folder,
    log_format: Format = "text",
) -> None:
    """Start the site's node, until Ctrl-C or SIGTERM. It opens no port to the outside.

    With --log-format json, lines carry events and codes only; what was wrong in words is in agent.log in the folder,
    which its owner alone can read.

    Example: fedspa site run north --log-format json
    """
    require_flower()
    from fedspa.flower.operate import logs, start
    from fedspa.flower.operate.folders import read_site

    site = read_site(folder)
    if log_format == "json":
        logs.as_json(site.path / "agent.log")
    start.run_site(site)


@app.command()
def ledger(folder: Folder, as_json: AsJson = False) -> None:
    """What this site spent and what its policy leaves: `fedspa ledger show` with the site's own files.

    Example: fedspa site ledger north
    """
    from fedspa.cli.ledger import show
    from fedspa.flower.operate.folders import read_site

    site = read_site(folder)
    show(site.ledger, policy=site.policy, as_json=as_json)


@app.command()
def health(folder: Folder) -> None:
    """Whether the node runs and its ledger lacks nothing, in one line. Exit code 0: it is well; 1: it is not.

    Example: fedspa site health north
    """
    from fedspa.flower.operate.folders import read_site
    from fedspa.flower.operate.health import of_site

    ended(*of_site(read_site(folder)))


@app.command()
def metrics(folder: Folder, out: Out = None) -> None:
    """The site's numbers for Prometheus: rounds, refusals by code, ε spent and left, bytes. None is made of records.

    With --out it writes the file that the node exporter's textfile collector reads.

    Example: fedspa site metrics north --out /var/lib/node_exporter/fedspa.prom
    """
    from fedspa.flower.operate.folders import read_site
    from fedspa.flower.operate.metrics import of_site

    given(of_site(read_site(folder)), out)


def ended(well: bool, line: str) -> None:
    """What came of it; exit code 1 where that is not well."""
    print(line)
    if not well:
        raise typer.Exit(1)


def given(text: str, out: Path | None) -> None:
    """Print it, or have a reader of `out` see it whole."""
    from fedspa import durable

    if out is None:
        print(text, end="")
        return
    with worded(ConfigError, lambda why: f"{out}: {why}; name a file in a folder that you may write to"):
        durable.replace_text(out, text)
        os.chmod(out, 0o644)  # its reader is another user


@app.command()
def keygen(
    out: Annotated[Path, typer.Argument(help="Where to write the secret key: a new file.", show_default=False)],
) -> None:
    """Make a site's key. The secret half is written to a new file that its owner alone can read, and stays there.

    The public half is printed. It goes into every site's roster under this site's name; its operator reads the
    fingerprint to the others by a way that the server has no hand in.

    Example: fedspa site keygen clinic-a.key
    """
    from fedspa.secagg.keys import SecretKey, fingerprint

    secret = SecretKey.generate()
    secret.save(out)
    print(f"public key   {secret.public.hex()}")
    print(f"fingerprint  {fingerprint(secret.public)}")


@app.command()
def roster(
    file: Annotated[Path, typer.Argument(help="The roster: a TOML file with the table members.", show_default=False)],
    key: Annotated[Path | None, typer.Option(help="This site's secret key: is its public half in the roster?")] = None,
    name: Annotated[str | None, typer.Option(help="This site's name: does it stand beside that key?")] = None,
) -> None:
    """Check a roster, and print its members with their fingerprints and the digest of them all.

    Sites whose rosters have the same digest have the same roster. Names and keys that stand twice, and keys that are
    none, are refused. With --key, exit code 1 if the roster does not have that key, or not under --name.

    Example: fedspa site roster roster.toml --key clinic-a.key --name clinic-a
    """
    from fedspa.secagg.keys import SecretKey, fingerprint
    from fedspa.secagg.roster import Roster

    if name is not None and key is None:
        raise ConfigError("--name wants --key: give the file of this site's secret key too")
    found = Roster.load(file)
    public = None if key is None else SecretKey.load(key).public
    width = max(map(len, found.members))
    for member, its in found.members.items():
        print(f"{member:{width}}  {fingerprint(its)}")
    print(f"digest  {found.digest}\n{file}: sound; {len(found.members)} members")
    if public is None:
        return
    owner = next((member for member, its in found.members.items() if its == public), None)
    if owner is not None and name in (None, owner):
        print(f"{key}: the key of {owner}")
        return
    where = "stands nowhere in it" if owner is None else f"stands beside {owner}, and not beside {name}"
    print(f"{key}: its public key {where}:\n{public.hex()}")
    raise typer.Exit(1)
