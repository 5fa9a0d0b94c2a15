"""`fedspa site` and `fedspa server`: the two sides of a deployment, each from its own folder; `fedspa new`."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from glob import glob
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer

from fedspa.cli.screen import AsJson, show_checks
from fedspa.errors import ConfigError, os_errors_as, quoted, real_path

site = typer.Typer(help="A site: create its folder, check it, run its node, see its status.", no_args_is_help=True)
server = typer.Typer(help="The server: create its folder, run it, train with it, see its status.", no_args_is_help=True)

SiteFolder = Annotated[Path, typer.Argument(metavar="FOLDER", help="The site's folder, from `fedspa site new`.")]
ServerFolder = Annotated[Path, typer.Argument(metavar="FOLDER", help="The server's folder, from `fedspa server new`.")]
LogFormat = Annotated[
    Literal["text", "json"],
    typer.Option("--log-format", envvar="FEDSPA_LOG_FORMAT", help="JSON lines contain nothing about records."),
]
Prometheus = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Also write the metrics to this file, for the node exporter's textfile reader."),
]


@site.command("new")
def new_site(
    folder: NewFolder,
    agent: Annotated[
        str | None, typer.Option(help="The site's name in its ledger; it never changes (the folder's name).")
    ] = None,
    data: Annotated[str, typer.Option(help="Its records: an .npz, a table, or module:function.")] = "records.npz",
    classes: Annotated[int, typer.Option(min=2, max=10**6, help="Number of classes.")] = 2,
    superlink: Annotated[str, typer.Option(metavar="HOST:PORT", help="The server's address.")] = "server.example:8443",
    certificate: Annotated[Path | None, typer.Option(help="The server's ca.crt, to copy into the folder.")] = None,
    port: Annotated[
        int,
        typer.Option(min=1, max=65535, help="Local port of the node's own processes: two nodes on a machine need two."),
    ] = 9094,
) -> None:
    """Create a site's folder: site.toml, policy.toml, the node's key, an empty ledger, and a short README.

    The ledger is created here and nowhere else: from then on a missing ledger is an error, never a fresh budget.

    Example: fedspa site new north --superlink server.example:8443
    """
    from fedspa.agent.ledger.ledger import Ledger
    from fedspa.flower import folders

    name = real_path(folder).name if agent is None else agent
    if not 0 < len(name) <= 200:
        raise ConfigError(f"--agent is {quoted(name)}; it must be a name of 1 to 200 characters")
    for option, value in (("--agent", name), ("--data", data), ("--superlink", superlink)):
        if not value.isprintable() or '"' in value or "\\" in value:
            raise ConfigError(f"{option} is {value!r}; give a text without quotes, backslashes and control characters")
    folders.require_address("--superlink", superlink)
    if certificate is not None:
        folders.read_certificate(certificate)
    names = {"site.toml": folders.SITE, "site_policy.toml": "policy.toml", "site_README.md": "README.md"}
    values = {"agent": name, "data": data, "classes": str(classes), "superlink": superlink, "port": str(port)}
    with os_errors_as(ConfigError, str(folder), "name a folder that can be written"):
        folders.make(folder)
        fill(folder, names, values)
        (folder / "apps.sha256").write_text("# Digests of the apps that were reviewed here; see `fedspa site pin`.\n")
        folders.make_node_key(folder / "node.key")
        (folder / "ledger").mkdir()
        if certificate is not None:
            shutil.copyfile(certificate, folder / "ca.crt")
        Ledger.open(folder / "ledger" / "ledger.sqlite").close()
    print(f"Created the site {name} in {folder}. Its README.md lists the next steps; then:\n")
    print(f"    fedspa site check {folder}\n")


@site.command("check")
def check_site(
    folder: SiteFolder,
    server: Annotated[bool, typer.Option("--server", help="Also try to reach the server.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check everything before the site joins: policy, records, ledger, keys, certificate, apps, versions.

    The output contains facts about records; treat it as confidential. Exit code 0: ready; 1: a check failed.

    Example: fedspa site check north --server
    """
    require_flower()
    from fedspa.flower.check import examine
    from fedspa.flower.folders import read_site_folder

    found = read_site_folder(folder)
    show_checks(found.agent, examine(found, server=server), as_json)


@site.command("pin")
def pin_app(
    folder: SiteFolder,
    application: Annotated[Path, typer.Argument(metavar="APP", help="An app's folder, or its .fab.")],
) -> None:
    """Allow an app at this site, by the digest of its bundle. Review it first: its code reads the records.

    A node runs pinned apps only, whatever the server sends.

    Example: fedspa site pin north examples/hospital
    """
    require_flower()
    from fedspa.flower.folders import read_site_folder
    from fedspa.flower.start import digest_of

    found = read_site_folder(folder)
    digest = digest_of(application)
    if digest not in found.digests():
        with os_errors_as(ConfigError, str(found.apps)), found.apps.open("a", encoding="utf-8") as file:
            file.write(f"{digest}  {real_path(application).name}\n")
    print(f"{found.agent} runs {application} as it is now:\n{digest}")


@site.command("run")
def run_site(folder: SiteFolder, log_format: LogFormat = "text") -> None:
    """Run the site's node until Ctrl-C or SIGTERM. It opens no port to the outside.

    With --log-format json, lines contain events and codes only; full messages go to agent.log in the folder, which
    only its owner can read.

    Example: fedspa site run north --log-format json
    """
    require_flower()
    from fedspa.flower import monitor, start
    from fedspa.flower.folders import read_site_folder

    found = read_site_folder(folder)
    if log_format == "json":
        monitor.as_json(found.path / "agent.log")
    start.run_site(found)


@site.command("status")
def show_site(folder: SiteFolder, prometheus: Prometheus = None) -> None:
    """Print in one line whether the node runs and its ledger is complete. Exit code 0: healthy; 1: unhealthy.

    With --prometheus, also write rounds, refusals by code, ε spent and left, and bytes. None is computed from records.
    `fedspa ledger show FOLDER` shows what was spent.

    Example: fedspa site status north --prometheus /var/lib/node_exporter/fedspa.prom
    """
    from fedspa.flower import monitor
    from fedspa.flower.folders import read_site_folder

    found = read_site_folder(folder)
    if prometheus is not None:
        _write_metrics(monitor.site_metrics(found), prometheus)
    _end(*monitor.site_health(found))


@site.command()
def keygen(
    out: Annotated[Path, typer.Argument(help="A new file for the secret key.", show_default=False)],
) -> None:
    """Create a site's key for secure aggregation. The secret half is written to a file that only its owner can read.

    The public half is printed. It goes into every site's roster under this site's name; its operator reads the
    fingerprint to the others over a channel that the server does not control.

    Example: fedspa site keygen clinic-a.key
    """
    from fedspa.secagg.keys import SecretKey, fingerprint

    secret = SecretKey.generate()
    secret.save(out)
    print(f"public key   {secret.public.hex()}")
    print(f"fingerprint  {fingerprint(secret.public)}")


@site.command("roster")
def check_roster(
    file: Annotated[Path, typer.Argument(help="The roster: a TOML file with the table members.", show_default=False)],
    key: Annotated[Path | None, typer.Option(help="This site's secret key: is its public half in the roster?")] = None,
    name: Annotated[str | None, typer.Option(help="This site's name: is it the owner of that key?")] = None,
) -> None:
    """Check a roster, and print its members with their fingerprints and the digest of the whole.

    Sites whose rosters have the same digest have the same roster. Duplicate names and keys, and invalid keys, are
    refused. With --key, exit code 1 if the roster does not have that key, or not under --name.

    Example: fedspa site roster roster.toml --key clinic-a.key --name clinic-a
    """
    from fedspa.secagg.keys import Roster, SecretKey, fingerprint

    if name is not None and key is None:
        raise ConfigError("--name requires --key; give the file of this site's secret key too")
    found = Roster.load(file)
    public = None if key is None else SecretKey.load(key).public
    width = max(map(len, found.members))
    for member, its in found.members.items():
        print(f"{member:{width}}  {fingerprint(its)}")
    print(f"digest  {found.digest}\n{file}: valid; {len(found.members)} members")
    if public is None:
        return
    owner = next((member for member, its in found.members.items() if its == public), None)
    if owner is not None and name in (None, owner):
        print(f"{key}: the key of {owner}")
        return
    where = "is not in the roster" if owner is None else f"belongs to {owner}, not to {name}"
    print(f"{key}: its public key {where}:\n{public.hex()}")
    raise typer.Exit(1)


@server.command("new")
def new_server(
    folder: NewFolder,
    name: Annotated[str, typer.Option(metavar="HOST", help="The host name that sites use; the certificate has it.")],
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port to listen on.")] = 8443,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "0.0.0.0",
) -> None:
    """Create the server's folder: server.toml, a certificate for its name, folders for sites' keys and for runs.

    If you have a certificate authority, replace the certificate that is created here with its own.

    Example: fedspa server new server --name server.example
    """
    from fedspa.flower import folders

    for option, value in (("--name", name), ("--host", host)):
        if not folders.is_host(value):
            raise ConfigError(f"{option} is {value!r}; give a host name or an address, as server.example")
    with os_errors_as(ConfigError, str(folder), "name a folder that can be written"):
        folders.make(folder)
        values = {"name": name, "host": host, "port": str(port)}
        fill(folder, {"server.toml": folders.SERVER, "server_README.md": "README.md"}, values)
        folders.make_certificate(folder, name)
        for part in ("nodes", "runs"):
            (folder / part).mkdir()
    print(f"Created the server {name} in {folder}. Its README.md lists the next steps; then:\n")
    print(f"    fedspa server run {folder}\n")


@server.command("run")
def run_server(folder: ServerFolder, log_format: LogFormat = "text") -> None:
    """Check the folder, then run the SuperLink until Ctrl-C or SIGTERM: TLS, and nodes with registered keys only.

    It checks certificate, key, folders, sites' keys and versions, prints the result, and starts if all passed. Exit
    code 1: a check failed.

    Example: fedspa server run server --log-format json
    """
    require_flower()
    from fedspa.flower import monitor, start
    from fedspa.flower.check import examine_server
    from fedspa.flower.folders import read_server_folder

    found = read_server_folder(folder)
    if log_format == "json":
        monitor.as_json(None)
    show_checks("server", examine_server(found), log_format == "json")
    start.run_server(found)


@server.command("register")
def register_nodes(
    folder: ServerFolder,
    keys: Annotated[list[Path] | None, typer.Argument(help="Public keys to copy into nodes/ first.")] = None,
) -> None:
    """Register the public keys in nodes/ with the running SuperLink: those nodes may join.

    Example: fedspa server register server north.pub
    """
    require_flower()
    from fedspa.flower import start
    from fedspa.flower.folders import read_server_folder

    for name, is_new in start.register(read_server_folder(folder), keys or []).items():
        print(f"{name}: {'registered' if is_new else 'was registered before'}")


@server.command("train")
def train(
    folder: ServerFolder,
    application: Annotated[Path, typer.Argument(metavar="APP", help="The app's folder.")],
    config: Annotated[
        str, typer.Option("--run-config", "-c", help="Override keys of the app's config: 'privacy.epsilon=1.0'.")
    ] = "",
    name: Annotated[str | None, typer.Option(help="Name of the run's folder in runs/ (the time).")] = None,
) -> None:
    """Start a run of an app with the connected nodes, print a line per round, and its outcome.

    Exit code 0: it was completed; 1: it was not. (`flwr run` itself ends with 0 for runs that fail.)

    Example: fedspa server train server examples/hospital -c 'privacy.epsilon=1.0'
    """
    require_flower()
    from fedspa.flower import start
    from fedspa.flower.folders import read_server_folder

    _end(*start.train(read_server_folder(folder), application, config, name, RoundPrinter()))


@server.command("status")
def show_server(folder: ServerFolder, prometheus: Prometheus = None) -> None:
    """Print in one line whether the SuperLink answers under its certificate. Exit code 0: healthy; 1: unhealthy.

    With --prometheus, also write rounds, updates, dropped answers by reason, ε and bytes of every run; no score, no
    loss.

    Example: fedspa server status server --prometheus /var/lib/node_exporter/fedspa.prom
    """
    from fedspa.flower import monitor
    from fedspa.flower.folders import read_server_folder

    found = read_server_folder(folder)
    if prometheus is not None:
        _write_metrics(monitor.server_metrics(found), prometheus)
    _end(*monitor.server_health(found))


class RoundPrinter:
    """Prints what it has not printed yet of a run: a line for each round, as `fedspa run` shows it, and at the end what
    the run promises."""

    def __init__(self) -> None:
        self._printed, self._ended = 0, False

    def __call__(self, folder: Path) -> None:
        """Print the news of a run, which may not have begun."""
        from fedspa.running import Progress
        from fedspa.runs.config import load
        from fedspa.runs.guarantee import statement
        from fedspa.runs.rundir import read_metrics, read_summary

        if not (folder / "metrics.jsonl").exists():
            return
        config, metrics = load(folder / "config.toml", own_code=False), read_metrics(folder / "metrics.jsonl")
        rounds = config.federation.rounds
        progress = Progress(config, lambda done, words: print(f"round {done} of {rounds}  {words}", flush=True))
        progress.resumed(metrics[: self._printed])
        for each in metrics[self._printed :]:
            progress.advance(each)
        self._printed = len(metrics)
        if not self._ended and (summary := read_summary(folder)) is not None:
            print(f"guarantee: {statement(summary)}", flush=True)
            self._ended = True


def require_flower() -> None:
    """Raise in one line if the extra is missing, before anything is done."""
    if find_spec("flwr") is None:
        raise ConfigError("sites and servers run on Flower, which is not installed: pip install 'fedspa[flower]'")


def _write_metrics(text: str, path: Path) -> None:
    from fedspa import durable

    with os_errors_as(ConfigError, str(path), "name a file in a folder that you may write to"):
        durable.replace_text(path, text)
        os.chmod(path, 0o644)  # another user reads it


def _end(healthy: bool, line: str) -> None:
    print(line)
    if not healthy:
        raise typer.Exit(1)


# What the files are called in the template, and in the project.
FILES = {name: name for name in ("config.toml", "my_data.py", "my_model.py", "README.md")}
FLOWER = {"flower.toml": "pyproject.toml", "my_data.py": "my_data.py", "my_model.py": "my_model.py"}
FLOWER |= {"flower.md": "README.md"}
TEXT = {"text.toml": "config.toml", "my_texts.py": "my_texts.py", "text.md": "README.md"}
NewFolder = Annotated[Path, typer.Argument(help="A folder that does not exist yet, or is empty.")]
_SIMULATE = "flwr run . --stream --federation-config 'num-supernodes=8 client-resources-num-cpus=1'"


def new(
    folder: NewFolder,
    flower: Annotated[bool, typer.Option("--flower", help="Make a Flower app, for separate sites.")] = False,
    more: Annotated[list[Path] | None, typer.Argument(metavar="[FILE]…", help="With --table, further tables.")] = None,
    table: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="A CSV of each agent, as in --table sites/*.csv: write a config for them."),
    ] = None,
    text: Annotated[
        bool, typer.Option("--text", help="A classifier of texts, a CSV per site: LoRA on a Hugging Face model.")
    ] = False,
) -> None:
    """Make a project: your own data function, model function and config, ready to run.

    Example: fedspa new my-study

    With --table, a config and a README for the columns that the files' heads name. Ranges and categories are to be
    filled in by hand, from public knowledge: only names and kinds are read.
    """
    given = [option for option, asked in (("--table", table), ("--flower", flower), ("--text", text)) if asked]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)}: give one of them")
    if table:
        _new_for_tables([folder, *(more or ())], table)
        return
    if more:
        raise ConfigError(f"{more[0]}: one folder is made; with --table, name the tables after it")
    files = FLOWER if flower else TEXT if text else FILES
    name = re.sub(r"[^a-z0-9]+", "-", real_path(folder).name.lower()).strip("-") or "federation"
    with os_errors_as(ConfigError, str(folder), "name a folder that can be written"):
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty; name a new folder")
        folder.mkdir(parents=True, exist_ok=True)
        fill(folder, files, {"name": name})
    command = _SIMULATE if flower else "fedspa run config.toml"
    if text:
        command = f"# sites/*.csv, test.csv, MODEL in my_texts.py: see README.md\n    {command}"
    print(f"Made {', '.join(files.values())} in {folder}. Now:\n\n    cd {folder}\n    {command}\n")


def _new_for_tables(names: Sequence[Path], tables: Sequence[Path]) -> None:
    """Write config and README for tables; a shell that expands --table *.csv leaves all but the first among `names`."""
    from fedspa.data.findings import config_of_tables
    from fedspa.data.plugin import is_table

    folders = [name for name in names if not is_table(str(name))]
    if len(folders) != 1:
        raise ConfigError(f"{len(folders)} folders are named beside the tables; name one, as in `fedspa new my-study`")
    found = [Path(match) for name in tables for match in sorted(glob(str(name))) or [str(name)]]
    found += [name for name in names if is_table(str(name))]
    text, (folder,) = config_of_tables(found), folders
    with os_errors_as(ConfigError, str(folder), "name a folder that can be written"):
        if (folder / "config.toml").exists():
            raise ConfigError(f"{folder} has a config.toml; name another folder")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.toml").write_text(text, "utf-8")
        tables_shown = " ".join(map(shlex.quote, map(str, found[:3]))) + " …" * (len(found) > 3)
        fill(folder, {"table_README.md": "README.md"}, {"table": tables_shown})
    print(f"Made config.toml and README.md in {folder}. Fill in every [] in config.toml, then:\n")
    print(f"    fedspa data check {tables_shown} --schema {folder / 'config.toml'}\n")


def fill(folder: Path, files: Mapping[str, str], values: Mapping[str, str]) -> None:
    """Write files of the template, by the names that they get in `folder`, each {word} of `values` in its place."""
    template = resources.files("fedspa.cli").joinpath("template")
    for source, target in files.items():
        text = template.joinpath(source).read_text("utf-8")
        for word, value in values.items():
            text = text.replace(f"{{{word}}}", value)
        (folder / target).write_text(text, "utf-8")
