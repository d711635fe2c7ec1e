"""cert: a certificate for local use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dsec.cli import common

_HOW = """made {cert} for *.{domain}, signed by {ca}

Serve it:     dsec up --set e2b.listen=127.0.0.1:7433 --set e2b.domain={domain}:7433 --set e2b.tls_cert={cert} --set e2b.tls_key={key}
E2B clients:  E2B_DOMAIN={domain}:7433 SSL_CERT_FILE={ca}
curl:         curl --cacert {ca} https://8080-ID.{domain}:7433/
Names:        *.{domain} must lead to the node: systemd-resolved does that for everything below .localhost, dnsmasq with
              address=/{domain}/127.0.0.1
Everybody on this machine (nothing was installed; whoever holds {directory}/ca.key.pem can then pretend to be any site):
              cp {ca} /usr/local/share/ca-certificates/dsec.crt && update-ca-certificates"""


def cert(
    domain: Annotated[str, typer.Argument(help="Of the host names PORT-ID.DOMAIN.")] = "dsec.localhost",
    directory: Annotated[Path | None, typer.Option("--dir", help="Where the files go.  [default: tls in the state directory]")] = None,
) -> None:
    """Make a certificate authority, if there is none yet, and a wildcard certificate for local use. Installs nothing."""
    from dsec import certs
    from dsec.config import load

    where = (directory or Path(load(None, flags={}).config.state_dir) / "tls").absolute()
    try:
        made = certs.make(where, domain)
    except ValueError as error:
        common.fail(f"invalid_request: {error}", 2)
    except OSError as error:
        common.fail(f"cannot write {where}: {error.strerror}")
    print(_HOW.format(domain=domain, directory=where, ca=made.ca, cert=made.cert, key=made.key))
