"""`fedspa site`: a site's key for secure aggregation, and the roster of those it adds up with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedspa.errors import ConfigError

app = typer.Typer(help="Secure aggregation at a site: its key, and the roster of members.", no_args_is_help=True)


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
    file: Annotated[Path, typer.Argument(help="The roster: a TOML file with [members].", show_default=False)],
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
    print(f"{file}: sound; {len(found.members)} members, digest {found.digest}")
    if public is None:
        return
    owner = next((member for member, its in found.members.items() if its == public), None)
    if owner is not None and name in (None, owner):
        print(f"{key}: the key of {owner}")
        return
    where = "stands nowhere in it" if owner is None else f"stands beside {owner}, and not beside {name}"
    print(f"{key}: its public key {public.hex()} {where}")
    raise typer.Exit(1)
