"""Certificates for local use: what they are for, what is kept, what is secret."""
from __future__ import annotations

import stat
from pathlib import Path

import pytest
from cryptography import x509

from dsec import certs


def test_an_authority_is_made_once_and_signs_for_one_domain(tmp_path: Path) -> None:
    files = certs.make(tmp_path / "tls", "dsec.localhost")
    authority = files.ca.read_bytes()
    first = x509.load_pem_x509_certificate(files.cert.read_bytes())
    names = first.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["*.dsec.localhost", "dsec.localhost", "localhost"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1", "::1"]
    signer = x509.load_pem_x509_certificate(authority)
    first.verify_directly_issued_by(signer)
    assert signer.extensions.get_extension_for_class(x509.BasicConstraints).value.path_length == 0, "it signs no other authority"
    assert not first.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    again = x509.load_pem_x509_certificate(certs.make(tmp_path / "tls", "other.example").cert.read_bytes())
    again.verify_directly_issued_by(signer)
    assert files.ca.read_bytes() == authority and again.serial_number != first.serial_number
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "tls").iterdir()}
    assert modes == {"ca.pem": 0o644, "ca.key.pem": 0o600, "cert.pem": 0o644, "key.pem": 0o600}
    certs.server_context(str(files.cert), str(files.key))
    with pytest.raises(ValueError, match="cannot use the certificate"):
        certs.server_context(str(files.cert), str(tmp_path / "none"))


@pytest.mark.parametrize("domain", ["localhost", "com", "", "*.a.b", "a..b", "A.b", "a b.c", "-a.b", "x" * 70 + ".a", "a.b\n"])
def test_domains_that_no_wildcard_can_stand_for(domain: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a domain"):
        certs.make(tmp_path, domain)
    assert not list(tmp_path.iterdir())
