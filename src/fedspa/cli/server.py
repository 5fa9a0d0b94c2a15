"""`fedspa server`: the server of a federation, from its folder to its runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedspa.cli.ledger import AsJson
from fedspa.cli.new import NewFolder, fill, whole
from fedspa.cli.site import Format, Out, ended, given, require_flower, told
from fedspa.errors import ConfigError, worded

app = typer.Typer(help="The server: make its folder, check it, run it, train with it.", no_args_is_help=True)

Folder = Annotated[Path, typer.Argument(help="The server's folder, which `fedspa server new` made.")]


@app.command()
def new(
    folder: NewFolder,
    name: Annotated[str, typer.Option(metavar="HOST", help="By which sites reach it: the certificate names it.")],
    port: Annotated[int, typer.Option(help="Where it listens.")] = 8443,
    host: Annotated[str, typer.Option(help="On which address it listens.")] = "0.0.0.0",
) -> None:
    """Make the server's folder: server.toml, a certificate for its name, a place for sites' keys and for runs.

    Whoever has an authority of their own puts its certificate in the place of the one that is made here.

    Example: fedspa server new server --name server.example
    """
    from fedspa.flower.operate import credentials, folders

    for option, value in (("--name", name), ("--host", host)):
        if not folders.is_host(value):
            raise ConfigError(f"{option} is {value!r}; give the name or the address of a machine, as server.example")
    if not 1 <= port <= 65535:
        raise ConfigError(f"--port is {port}; it must be a number from 1 to 65535")
    with worded(ConfigError, lambda why: f"{folder}: {why}; name a folder that can be written"), whole(folder):
        folders.make(folder)
        values = {"name": name, "host": host, "port": str(port)}
        fill(folder, {"server.toml": folders.SERVER, "server_README.md": "README.md"}, values)
        credentials.make_certificate(folder, name)
        for part in ("nodes", "runs"):
            (folder / part).mkdir()
    print(f"Made the server {name} in {folder}. Its README.md says what comes next; then:\n")
    print(f"    fedspa server check {folder}\n")


@app.command()
def check(folder: Folder, as_json: AsJson = False) -> None:
    """Look at everything before the server is started: certificate, key, database, sites' keys, versions.

    Exit code 0: ready; 1: something is to be mended.

    Example: fedspa server check server
    """
    require_flower()
    from fedspa.flower.operate.folders import read_server
    from fedspa.flower.operate.server_check import examine

    told("server", examine(read_server(folder)), as_json)


@app.command()
def run(folder: Folder, log_format: Format = "text") -> None:
    """Start the SuperLink, until Ctrl-C or SIGTERM: TLS, and nodes with registered keys only.

    Example: fedspa server run server --log-format json
    """
    require_flower()
    from fedspa.flower.operate import logs, start
    from fedspa.flower.operate.folders import read_server

    server = read_server(folder)
    if log_format == "json":
        logs.as_json(None)
    start.run_server(server)


@app.command()
def register(
    folder: Folder,
    keys: Annotated[list[Path] | None, typer.Argument(help="Public keys to copy into nodes/ first.")] = None,
) -> None:
    """Tell the running SuperLink the public keys in nodes/: those nodes may join. Keys that it knows stay.

    Example: fedspa server register server north.pub
    """
    require_flower()
    from fedspa.flower.operate import runs
    from fedspa.flower.operate.folders import read_server

    for name, fresh in runs.register(read_server(folder), keys or []).items():
        print(f"{name}: {'registered' if fresh else 'was registered before'}")


@app.command()
def train(
    folder: Folder,
    application: Annotated[Path, typer.Argument(metavar="APP", help="The app's folder.")],
    config: Annotated[
        str, typer.Option("--run-config", "-c", help="Overrides keys of the app's config: 'privacy.epsilon=1.0'.")
    ] = "",
    name: Annotated[str | None, typer.Option(help="Of the run's folder in runs/ (the time).")] = None,
) -> None:
    """Start a run of an app with the nodes that are there, wait for its end, and say what came of it.

    Exit code 0: it was completed; 1: it was not. (`flwr run` itself ends with 0 for runs that fail.)

    Example: fedspa server train server examples/hospital -c 'privacy.epsilon=1.0'
    """
    require_flower()
    from fedspa.flower.operate import runs
    from fedspa.flower.operate.folders import read_server

    ended(*runs.train(read_server(folder), application, config, name))


@app.command()
def health(folder: Folder) -> None:
    """Whether the SuperLink answers under its certificate, in one line. Exit code 0: it is well; 1: it is not.

    Example: fedspa server health server
    """
    from fedspa.flower.operate.folders import read_server
    from fedspa.flower.operate.health import of_server

    ended(*of_server(read_server(folder)))


@app.command()
def metrics(folder: Folder, out: Out = None) -> None:
    """The server's numbers for Prometheus: rounds, updates, what was dropped and why, ε, bytes. No score, no loss.

    Example: fedspa server metrics server --out /var/lib/node_exporter/fedspa.prom
    """
    from fedspa.flower.operate.folders import read_server
    from fedspa.flower.operate.metrics import of_server

    given(of_server(read_server(folder)), out)
