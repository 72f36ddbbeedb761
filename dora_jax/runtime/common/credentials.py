"""Who a process of a run is: certificates of the run's own authority, and the TLS contexts of every connection.

    controller   Authority().issue(role, incarnation) -> PEM   given to the processes of a gang as they start
    process      Credential(PEM)                               its member, and the contexts to listen and to dial by

Laws: a certificate names the run, the role and the incarnation, and no machine; TLS 1.3 alone is spoken, both sides
show a certificate, and no session is resumed; a certificate ends with its run, whose authority is gone then, or where a
peer knows a newer incarnation, and never by a clock: those of the machines differ.
"""

from __future__ import annotations

import datetime
import secrets
import ssl
import tempfile
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import NameOID

AUTHORITY, CONTROLLER = "authority", "controller"  # roles; the others are the names of gangs
NAMES = NameOID.ORGANIZATION_NAME, NameOID.COMMON_NAME, NameOID.SERIAL_NUMBER  # of run, role and incarnation
BEGIN, END = datetime.datetime(1970, 1, 2), datetime.datetime(9999, 12, 31, 23, 59, 59)  # the second: "no end" (X.509)


class Member(NamedTuple):
    """Whom a certificate of the run names: the processes of one incarnation of a gang, or a controller."""

    role: str
    incarnation: int


class Authority:
    """The certificate authority of one run."""

    def __init__(self, pem: str = "", run: str = ""):
        """`pem`: of one that was made before. `run`: the name of a new one, else random. ValueError: `pem` is none."""
        if pem:
            key = load_pem_private_key(pem.encode(), None)
            if not isinstance(key, ec.EllipticCurvePrivateKey):
                raise ValueError(f"a {type(key).__name__} is no key of an authority")
            self._key, self._certificate = key, x509.load_pem_x509_certificate(pem.encode())
        else:
            self._key, name = (
                ec.generate_private_key(ec.SECP256R1()),
                _name(run or secrets.token_hex(16), Member(AUTHORITY, 0)),
            )
            constraints = x509.BasicConstraints(ca=True, path_length=0)
            unsigned = _unsigned(name, name, self._key).add_extension(constraints, critical=True)
            self._certificate = unsigned.sign(self._key, hashes.SHA256())
        self.run, _ = _names(self._certificate)
        self.pem = _pem(self._certificate) + _pem_of_key(self._key)  # the run's secret

    def issue(self, role: str, incarnation: int) -> str:
        """A member's certificate and key, and the authority's certificate, as `Credential` reads them."""
        key, name = ec.generate_private_key(ec.SECP256R1()), _name(self.run, Member(role, incarnation))
        certificate = _unsigned(name, self._certificate.subject, key).sign(self._key, hashes.SHA256())
        return _pem(certificate) + _pem_of_key(key) + _pem(self._certificate)


class Credential:
    """What a process shows to others, and what it knows them by."""

    def __init__(self, pem: str):
        self._run, self.member = _names(x509.load_pem_x509_certificate(pem.encode()))
        authority = pem[pem.rindex("-----BEGIN CERTIFICATE") :]
        self.server, self.client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        with tempfile.NamedTemporaryFile("w") as file:  # its owner alone reads it; `ssl` takes a key from nowhere else
            file.write(pem)
            file.flush()
            for context in (self.server, self.client):
                context.minimum_version = ssl.TLSVersion.TLSv1_3
                context.check_hostname = False  # a role is on any machine
                context.verify_mode = ssl.CERT_REQUIRED
                context.load_verify_locations(cadata=authority)
                context.load_cert_chain(file.name)
        self.server.num_tickets = 0  # of sessions to resume

    def member_of(self, peer: ssl.SSLSocket) -> Member:
        """Whom a connection leads to, after its handshake. ConnectionError: to another run."""
        run, member = _names(x509.load_der_x509_certificate(peer.getpeercert(binary_form=True) or b""))
        if run != self._run:
            raise ConnectionError(f"{member.role} is of run {run}, not of {self._run}")
        return member


# ---------------------------------------------------------------- private


def _name(run: str, member: Member) -> x509.Name:
    values = run, member.role, str(member.incarnation)
    return x509.Name([x509.NameAttribute(oid, value) for oid, value in zip(NAMES, values, strict=True)])


def _names(certificate: x509.Certificate) -> tuple[str, Member]:
    run, role, incarnation = (str(certificate.subject.get_attributes_for_oid(oid)[0].value) for oid in NAMES)
    return run, Member(role, int(incarnation))


def _unsigned(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    return builder.serial_number(x509.random_serial_number()).not_valid_before(BEGIN).not_valid_after(END)


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(Encoding.PEM).decode()


def _pem_of_key(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
