"""A certificate authority of one's own, for local use: it signs one wildcard certificate, and nothing here makes anybody trust it."""

from __future__ import annotations

import datetime
import ipaddress
import re
import ssl
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from dsec.linux.files import write_whole

DAYS = 397  # of a server's certificate: more is refused by some clients
_CA_DAYS = 3650
_LATE = datetime.timedelta(hours=1)  # clocks differ
_DOMAIN = re.compile(r"(?=.{1,200}$)[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)+")


class Files(NamedTuple):
    """PEM files. Only `key` and the authority's own key are secret."""

    ca: Path
    cert: Path
    key: Path


def make(directory: Path, domain: str) -> Files:
    """A certificate for `*.<domain>`, `<domain>`, localhost and the loopback addresses. The authority in `directory` is used again when
    there is one: whoever trusts it trusts the new certificate too. ValueError: no such domain can be in a wildcard certificate."""
    if not _DOMAIN.fullmatch(domain):
        raise ValueError(f"{domain!r} is not a domain of two parts or more, in lower case: no wildcard stands for a whole top-level domain")
    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    authority, signer = _authority(directory)
    key = ec.generate_private_key(ec.SECP256R1())
    names: list[x509.GeneralName] = [x509.DNSName(f"*.{domain}"), x509.DNSName(domain), x509.DNSName("localhost")]
    names += [x509.IPAddress(ipaddress.ip_address(address)) for address in ("127.0.0.1", "::1")]
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, domain[:64])])
    cert = (
        _begin(subject, authority.subject, key.public_key(), DAYS)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .sign(signer, hashes.SHA256())
    )
    files = Files(directory / "ca.pem", directory / "cert.pem", directory / "key.pem")
    write_whole(files.key, _pem_of(key))
    _write_public(files.cert, cert)
    return files


def server_context(cert: str, key: str) -> ssl.SSLContext:
    """TLS of a server. ValueError says what is wrong with the files."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise ValueError(f"cannot use the certificate {cert} with the key {key}: {error}") from error
    return context


def _authority(directory: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    cert_file, key_file = directory / "ca.pem", directory / "ca.key.pem"
    if cert_file.exists() and key_file.exists():
        known = x509.load_pem_x509_certificate(cert_file.read_bytes())
        key = serialization.load_pem_private_key(key_file.read_bytes(), None)
        soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=DAYS)
        if isinstance(key, ec.EllipticCurvePrivateKey) and known.not_valid_after_utc > soon:
            return known, key
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "dsec local authority")])
    cert = (
        _begin(name, name, key.public_key(), _CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    write_whole(key_file, _pem_of(key))
    _write_public(cert_file, cert)
    return cert, key


def _begin(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key).serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - _LATE).not_valid_after(now + datetime.timedelta(days=days))


def _usage(signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True, key_cert_sign=signs, crl_sign=signs, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _write_public(path: Path, cert: x509.Certificate) -> None:
    write_whole(path, cert.public_bytes(serialization.Encoding.PEM))
    path.chmod(0o644)


def _pem_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    plain = serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
