"""Certificate authorities, certificates and signing keys that live as long as a test.

authority = Authority("clients")
cert_file, key_file = authority.issue("loader").write(tmp_path, "loader")
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from cryptography.x509.oid import NameOID

LOCAL_NAMES = ("localhost", "127.0.0.1")
"""What a server of the tests is called."""


@dataclass(frozen=True)
class Issued:
    """A certificate and its key, in PEM."""

    certificate: bytes
    key: bytes

    def write(self, directory: Path, name: str) -> tuple[str, str]:
        """Writes both to files, and gives their paths."""
        paths = directory / f"{name}.crt", directory / f"{name}.key"
        for path, content in zip(paths, (self.certificate, self.key), strict=True):
            path.write_bytes(content)
        return str(paths[0]), str(paths[1])


class Authority:
    """Signs certificates."""

    def __init__(self, name: str = "authority") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        now = datetime.now(UTC)
        self._certificate = (
            _builder(self._name, self._name, self._key.public_key(), now, now + timedelta(days=30))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.certificate = self._certificate.public_bytes(Encoding.PEM)

    def write(self, directory: Path, name: str = "ca") -> str:
        """Writes the authority's own certificate to a file, and gives its path."""
        path = directory / f"{name}.crt"
        path.write_bytes(self.certificate)
        return str(path)

    def issue(
        self,
        name: str,
        *,
        names: Sequence[str | x509.GeneralName] = (),
        start: timedelta = timedelta(days=-1),
        end: timedelta = timedelta(days=7),
    ) -> Issued:
        """A certificate.

        Args:
            name: The common name.
            names: Alternative names: addresses, URIs, emails and host names, or of any kind.
            start: When it begins, from now on.
            end: When it ends, from now on.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.now(UTC)
        builder = _builder(_name(name), self._name, key.public_key(), now + start, now + end)
        builder = builder.add_extension(
            x509.BasicConstraints(ca=False, path_length=None), critical=True
        )
        if names:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([_alternative(item) for item in names]), critical=False
            )
        certificate = builder.sign(self._key, hashes.SHA256())
        return Issued(certificate.public_bytes(Encoding.PEM), _private(key))


def signing_keys(algorithm: str) -> tuple[bytes, bytes]:
    """A private key for JWTs and its public one, in PEM."""
    if algorithm == "EdDSA":
        key = ed25519.Ed25519PrivateKey.generate()
    elif algorithm.startswith("ES"):
        curve = {"ES256": ec.SECP256R1(), "ES384": ec.SECP384R1(), "ES512": ec.SECP521R1()}
        key = ec.generate_private_key(curve[algorithm])
    else:
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return _private(key), public


def _private(key) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _builder(subject, issuer, public_key, start, end) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(end)
    )


def _alternative(name: str | x509.GeneralName) -> x509.GeneralName:
    if isinstance(name, x509.GeneralName):
        return name
    if "://" in name:
        return x509.UniformResourceIdentifier(name)
    if "@" in name:
        return x509.RFC822Name(name)
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


_OTHER = x509.OtherName(x509.ObjectIdentifier("1.3.6.1.4.1.311.20.2.3"), b"\x0c\x05admin")
_DIRECTORY = x509.DirectoryName(_name("admin"))

IDENTITIES = {
    "common name": ((), "admin"),
    "URI": (("spiffe://example/loader",), "spiffe://example/loader"),
    "DNS": (("loader.example", "spiffe://example/loader"), "loader.example"),
    "email": (("loader@example.org",), "loader@example.org"),
    "other name": ((_OTHER,), None),
    "directory name": ((_DIRECTORY,), None),
    "address": (("10.0.0.1",), None),
    "other name first": ((_OTHER, "loader.example"), "loader.example"),
    "directory name first": ((_DIRECTORY, "10.0.0.1", "loader@example.org"), "loader@example.org"),
}
"""Alternative names of a certificate whose common name is `admin`, and whom it stands for."""
