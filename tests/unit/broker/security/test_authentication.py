"""Credentials: the JWT matrix, API keys, certificates, and headers that mean nothing."""

import base64
import hashlib
import hmac
import itertools
import json
import ssl
import time
from datetime import timedelta

import jwt
import pytest

from ister.broker.security.authentication import Authenticator, collect_headers, read_certificate
from ister.broker.security.minting import make_api_key, make_token
from ister.config import AuthConfig, AuthMode, JwtConfig
from ister.errors import ConfigError, UnauthenticatedError
from tests.support.cases import each, product
from tests.support.certificates import IDENTITIES, Authority, signing_keys
from tests.support.clock import ManualClock

SECRET = "0123456789abcdef" * 4
ISSUER, AUDIENCE = "https://issuer.example", "ister"
ASYMMETRIC = ("RS256", "PS256", "ES256", "ES384", "EdDSA")
ALGORITHMS = ("HS256", "HS512", *ASYMMETRIC)
KEYS = {algorithm: signing_keys(algorithm) for algorithm in ASYMMETRIC}


class Issuer:
    """Signs tokens for an authenticator of one algorithm."""

    def __init__(self, algorithm, directory, **more):
        self.clock = ManualClock()
        self.algorithm = algorithm
        self.now = self.clock.now_ns() // 10**9
        self.key = SECRET
        settings = {"algorithm": algorithm, "issuer": ISSUER, "audience": AUDIENCE}
        if algorithm in KEYS:
            self.key, public = KEYS[algorithm]
            path = directory / "public.pem"
            path.write_bytes(public)
            settings["public_key_file"] = str(path)
        else:
            settings["secret"] = SECRET
        config = AuthConfig(mode=AuthMode.TOKEN, jwt=JwtConfig(**{**settings, **more}))
        self.authenticator = Authenticator(config, clock=self.clock)

    def claims(self, **more):
        claims = {"sub": "alice", "iss": ISSUER, "aud": AUDIENCE, "exp": self.now + 600, **more}
        return {name: value for name, value in claims.items() if value is not None}

    def sign(self, headers=None, key=None, algorithm=None, **claims):
        algorithm = algorithm or self.algorithm
        return jwt.encode(
            self.claims(**claims), key or self.key, algorithm=algorithm, headers=headers
        )

    def check(self, token):
        return self.authenticator.authenticate({"authorization": f"Bearer {token}"})


@pytest.fixture(params=ALGORITHMS)
def issuer(request, tmp_path):
    return Issuer(request.param, tmp_path)


@pytest.fixture
def plain(tmp_path):
    return Issuer("HS256", tmp_path)


def encode(value):
    return base64.urlsafe_b64encode(value).rstrip(b"=")


def forge(header, claims, key):
    """A token with an HMAC, whatever its header says."""
    content = b".".join(encode(json.dumps(part).encode()) for part in (header, claims))
    return (content + b"." + encode(hmac.digest(key, content, hashlib.sha256))).decode()


def test_good_token_is_a_principal(issuer):
    principal = issuer.check(issuer.sign(principal_type="service_account"))
    assert (principal.name, principal.kind, principal.via) == ("alice", "service", "jwt")
    assert principal.expires_at == issuer.now + 600 + 30, "its end and the leeway"
    settings = {"algorithm": issuer.algorithm, "key": issuer.key, "clock": issuer.clock}
    ours = make_token("loader", issuer=ISSUER, audience=AUDIENCE, lifetime_seconds=60, **settings)
    assert issuer.check(ours).name == "loader"


@each(
    ("claims", "reason"),
    [
        ({"exp": None}, "no claim 'exp'"),
        ({"iss": None}, "no claim 'iss'"),
        ({"aud": None}, "no claim 'aud'"),
        ({"sub": None}, "no claim 'sub'"),
        ({"iss": "https://other.example"}, "another issuer"),
        ({"aud": "kafka"}, "another audience"),
        ({"aud": ["kafka", "pulsar"]}, "another audience"),
        ({"aud": []}, "no claim .aud."),
        ({"exp": -31}, "has expired"),
        ({"exp": -1_000_000}, "has expired"),
        ({"nbf": 31}, "not valid yet"),
        ({"iat": 31}, "not valid yet"),
        ({"sub": ""}, "names no valid principal|no claim"),
        ({"sub": "a\nb"}, "names no valid principal"),
        ({"sub": "x" * 257}, "names no valid principal"),
        ({"principal_type": "broker_internal"}, "names no valid principal"),
        ({"principal_type": "anonymous"}, "names no valid principal"),
        ({"principal_type": ["user"]}, "names no valid principal"),
        ({"principal_name": "bob"}, "principal_name and sub differ"),
        ({"principal_name": None, "sub": None}, "no claim 'sub'"),
    ],
)
def test_bad_claims_are_refused(issuer, claims, reason):
    for name in ("exp", "nbf", "iat"):
        if isinstance(claims.get(name), int):
            claims = {**claims, name: issuer.now + claims[name]}
    with pytest.raises(UnauthenticatedError, match=reason):
        issuer.check(issuer.sign(**claims))


DANUBE = {"iss": "danube-auth", "sub": "shop", "principal_name": "shop"}
"""The claims of a token of Danube's tools, but for `exp` and `principal_type`."""


def danube_check(**claims):
    """Checks a token with these claims by settings without an audience."""
    settings = JwtConfig(algorithm="HS256", secret=SECRET, issuer="danube-auth")
    clock = ManualClock()
    authenticator = Authenticator(AuthConfig(mode=AuthMode.TOKEN, jwt=settings), clock=clock)
    claims = {**DANUBE, "exp": int(clock.now_ns() / 1e9) + 60, **claims}
    token = jwt.encode(claims, SECRET, algorithm="HS256")
    return authenticator.authenticate({"authorization": f"Bearer {token}"})


@each(("spelled", "kind"), [("service_account", "service"), ("user", "user")])
def test_token_of_danubes_tools_is_taken_by_settings_without_an_audience(
    tmp_path, spelled, kind, caplog
):
    Issuer("HS256", tmp_path)  # with an audience, about which nothing is said
    principal = danube_check(principal_type=spelled)
    assert (principal.name, principal.kind) == ("shop", kind)
    [warning] = caplog.records
    assert "audience is not set" in warning.message


@each(
    ("claims", "reason"),
    [
        ({"aud": "kafka"}, "another audience"),
        ({"iss": "another"}, "another issuer"),
        ({"principal_type": "broker_internal"}, "no valid principal"),
        ({"principal_name": "root"}, "principal_name and sub differ"),
        ({"exp": 1}, "has expired"),
    ],
)
def test_token_is_still_checked_by_settings_without_an_audience(claims, reason):
    with pytest.raises(UnauthenticatedError, match=reason):
        danube_check(**{"principal_type": "user", **claims})


@each(
    ("name", "value"),
    [
        *product(("exp", "nbf", "iat"), ("9999999999", True, [1], {}, 1e400, 10**400)),
        *product(("sub", "iss", "aud"), (7, True, {"a": 1}, [["x"]], [ISSUER])),
    ],
)
def test_claim_of_another_kind_is_refused(plain, name, value):
    token = forge({"alg": "HS256"}, plain.claims(**{name: value}), SECRET.encode())
    with pytest.raises(UnauthenticatedError):
        plain.check(token)


@each("leeway", [0, 60])
def test_leeway_is_the_difference_of_clocks_and_no_more(tmp_path, leeway):
    issuer = Issuer("HS256", tmp_path, leeway_seconds=leeway)
    assert issuer.check(issuer.sign(exp=issuer.now - leeway + 1))
    assert issuer.check(issuer.sign(nbf=issuer.now + leeway, iat=issuer.now + leeway))
    for claims in ({"exp": -leeway}, {"nbf": leeway + 1}, {"iat": leeway + 1}):
        ((name, seconds),) = claims.items()
        with pytest.raises(UnauthenticatedError):
            issuer.check(issuer.sign(**{name: issuer.now + seconds}))


@each("word", ["none", "None", "NONE", ""])
def test_unsigned_token_is_refused(issuer, word):
    parts = [encode(json.dumps(part).encode()) for part in ({"alg": word}, issuer.claims())]
    for signature in (b"", b"AAAA"):
        with pytest.raises(UnauthenticatedError):
            issuer.check(b".".join([*parts, signature]).decode())


def test_forged_and_changed_tokens_are_refused(issuer):
    """Goal: neither another key, nor an HMAC with what everybody knows, nor other content."""
    public = KEYS[issuer.algorithm][1] if issuer.algorithm in KEYS else b"public"
    for word, key in itertools.product(("HS256", issuer.algorithm), (public, public.strip())):
        with pytest.raises(UnauthenticatedError):
            issuer.check(forge({"alg": word}, issuer.claims(), key))
    key = signing_keys(issuer.algorithm)[0] if issuer.algorithm in KEYS else SECRET[::-1]
    with pytest.raises(UnauthenticatedError, match="signature"):
        issuer.check(issuer.sign(key=key))
    token = issuer.sign()
    head, body, signature = token.split(".")
    changed = encode(json.dumps(issuer.claims(sub="root")).encode()).decode()
    for bad in (f"{head}.{changed}.{signature}", f"{head}.{body}.", f"{head}.{body}", token[:-8]):
        with pytest.raises(UnauthenticatedError):
            issuer.check(bad)
    for one, other in (("RS256", "RS512"), ("HS256", "HS512")):
        if issuer.algorithm == one:
            with pytest.raises(UnauthenticatedError, match="another algorithm"):
                issuer.check(issuer.sign(algorithm=other))


@each(
    "headers",
    [
        {"crit": ["exp"]},
        {"crit": ["b64"], "b64": False},
        {"kid": "../../dev/null", "jku": "http://127.0.0.1:1/keys", "jwk": {"kty": "oct"}},
    ],
)
def test_header_of_a_token_chooses_nothing(plain, headers):
    token = plain.sign(headers=headers)
    if "crit" in headers:
        with pytest.raises(UnauthenticatedError):
            plain.check(token)
    else:
        assert plain.check(token).name == "alice", "not looked at, and nothing fetched"


def test_hostile_bytes_are_refused(plain):
    """Goal: deep JSON, bad UTF-8, long texts are refused as any bad token."""
    heads = (b"[]", b"{{", b'{"alg": 5}', b'{"alg": null}', b'{"alg": ["HS256"]}', b"\xff\xfe")
    deep = b'{"alg":"HS256","a":' + b"[" * 2400 + b"]" * 2400 + b"}"
    hostile = ["", ".", "..", "...", "a.b.c", "a" * 9000, "\udc80.\udc80.\udc80", "ä.ö.ü"]
    hostile += [f"{encode(head).decode()}.e30.AA" for head in (*heads, deep)]
    deep_claims = b'{"alg":"HS256"}', b'{"a":' + b"[" * 2000 + b"]" * 2000 + b"}"
    content = b".".join(map(encode, deep_claims))
    signed = content + b"." + encode(hmac.digest(SECRET.encode(), content, hashlib.sha256))
    for text in (*hostile, signed.decode()):
        with pytest.raises(UnauthenticatedError):
            plain.check(text)


def test_errors_never_quote_the_token(plain):
    canary = "CANARY" * 8
    for token in (
        canary,
        f"{canary}.{canary}.{canary}",
        plain.sign(iss=canary),
        plain.sign(aud=canary),
        plain.sign(sub=f"{canary}\n"),
        forge({"alg": canary}, plain.claims(), b"x"),
        plain.sign(key=canary),
    ):
        with pytest.raises(UnauthenticatedError) as caught:
            plain.check(token)
        said = f"{caught.value} {caught.value!r}"
        assert canary not in said
        assert token not in said


@each(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Bearer "},
        {"authorization": "Basic YWxpY2U6c2VjcmV0"},
        {"x-danube-internal-broker": "broker-1"},
        {"x-danube-internal-broker": "broker-1", "x-forwarded-user": "root"},
        {"x-api-key": ""},
        {"authorization": "Bearer ist_nobody"},
    ],
)
def test_nothing_else_is_a_credential(plain, headers):
    with pytest.raises(UnauthenticatedError):
        plain.authenticator.authenticate(headers)
    signed = {"x-danube-internal-broker": "b", "authorization": f"bearer  {plain.sign()}"}
    principal = plain.authenticator.authenticate(signed)
    assert (principal.name, principal.kind) == ("alice", "user"), "and changes nothing"


def test_collected_headers_are_credentials_alone():
    pairs = [("Authorization", "Bearer x"), ("X-Danube-Internal-Broker", "b"), ("te", "trailers")]
    assert collect_headers(pairs) == {"authorization": "Bearer x"}
    for bad in (
        [pairs[0], pairs[0]],
        [("x-api-key", "a"), ("x-api-key", "b")],
        [("authorization", b"Bearer \xff")],
    ):
        with pytest.raises(UnauthenticatedError):
            collect_headers(bad)


# -- API keys and certificates --------------------------------------------------------------


def with_keys(directory, *lines, clock=None, **more):
    path = directory / "keys"
    path.write_text("\n".join(lines))
    config = AuthConfig(mode=AuthMode.TOKEN, api_keys_file=str(path), **more)
    return Authenticator(config, clock=clock or ManualClock())


def test_api_key_comes_in_either_header(tmp_path):
    key, line = make_api_key("loader")
    authenticator = with_keys(tmp_path, line)
    for headers in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}):
        principal = authenticator.authenticate(headers)
        assert (principal.name, principal.kind, principal.via) == ("loader", "service", "api-key")
    with pytest.raises(UnauthenticatedError, match="two credentials"):
        authenticator.authenticate({"authorization": f"Bearer {key}", "x-api-key": key})
    with pytest.raises(UnauthenticatedError, match="does not accept tokens"):
        authenticator.authenticate({"authorization": "Bearer a.b.c"})


def test_api_key_expires(tmp_path):
    clock = ManualClock()
    key, line = make_api_key("loader", expires_at=clock.now_ns() / 1e9 + 10)
    authenticator = with_keys(tmp_path, line, clock=clock)
    principal = authenticator.authenticate({"x-api-key": key})
    assert authenticator.is_current(principal)
    clock.advance(10)
    assert not authenticator.is_current(principal)
    with pytest.raises(UnauthenticatedError, match="expired"):
        authenticator.authenticate({"x-api-key": key})


def test_certificate_counts_only_where_it_is_asked_for(tmp_path):
    key, line = make_api_key("loader")
    clients = Authority()
    loader = clients.issue("other", names=("spiffe://example/loader",)).certificate
    off = with_keys(tmp_path, line)
    with pytest.raises(UnauthenticatedError):
        off.authenticate({}, certificate=loader)
    on = with_keys(tmp_path, line, mtls_principal=True)
    found = on.authenticate({}, certificate=loader)
    assert (found.name, found.kind, found.via) == ("spiffe://example/loader", "service", "mtls")
    nobody = clients.issue("admin", names=("10.0.0.1",)).certificate
    for certificate in (loader, nobody):
        assert on.authenticate({"x-api-key": key}, certificate=certificate).name == "loader"
    for headers, certificate in (
        ({"authorization": "Bearer ist_wrong"}, loader),
        ({"x-api-key": ""}, loader),
        ({}, clients.issue("a\nb").certificate),
        ({}, b"no certificate"),
        ({}, None),
    ):
        with pytest.raises(UnauthenticatedError):
            on.authenticate(headers, certificate=certificate)


def test_certificate_expires_on_an_open_connection(tmp_path):
    clock = ManualClock(now_ms=int(time.time() * 1000))
    on = with_keys(tmp_path, mtls_principal=True, clock=clock)
    loader = Authority().issue("loader", end=timedelta(hours=1)).certificate
    principal = on.authenticate({}, certificate=loader)
    assert on.is_current(principal)
    clock.advance(3601)
    assert not on.is_current(principal), "streams end"
    with pytest.raises(UnauthenticatedError, match="the client certificate has expired"):
        on.authenticate({}, certificate=loader)


@each("case", IDENTITIES)
def test_certificate_stands_for_its_first_usable_name(case):
    names, wanted = IDENTITIES[case]
    certificate = Authority().issue("admin", names=names).certificate
    for content in (certificate, ssl.PEM_cert_to_DER_cert(certificate.decode())):
        if wanted is None:
            with pytest.raises(UnauthenticatedError, match="names no principal"):
                read_certificate(content)
        else:
            assert read_certificate(content)[0] == wanted


def test_auth_off_is_anonymous():
    authenticator = Authenticator(AuthConfig(), clock=ManualClock())
    principal = authenticator.authenticate({"authorization": "Bearer whatever"})
    assert principal.kind == "anonymous"
    assert not authenticator.takes_certificates


# -- settings -------------------------------------------------------------------------------


HMAC = {"algorithm": "HS256", "issuer": "i", "audience": "a"}


@each(
    ("settings", "reason"),
    [
        ({}, "no way to authenticate"),
        ({"secret": SECRET}, "no algorithm"),
        ({**HMAC, "algorithm": "none"}, "algorithm 'none'"),
        ({**HMAC, "algorithm": "hs256"}, "algorithm 'hs256'"),
        ({**HMAC, "issuer": None, "secret": SECRET}, "needs an issuer"),
        (HMAC, "has 0 bytes"),
        ({**HMAC, "secret": "x" * 31}, "has 31 bytes"),
        ({**HMAC, "algorithm": "HS512", "secret": "x" * 63}, "has 63 bytes"),
        ({**HMAC, "secret": KEYS["RS256"][1].decode()}, "PEM"),
        ({**HMAC, "algorithm": "RS256"}, "requires"),
        ({**HMAC, "algorithm": "RS256", "secret": SECRET}, "uses a public key"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, reason):
    config = AuthConfig(mode=AuthMode.TOKEN, jwt=JwtConfig(**settings))
    with pytest.raises(ConfigError, match=reason) as caught:
        Authenticator(config, clock=ManualClock())
    assert SECRET not in str(caught.value)


@each(
    ("algorithm", "content", "reason"),
    [
        ("RS256", KEYS["ES256"][1], "not one for RS256"),
        ("ES256", KEYS["ES384"][1], "not one for ES256"),
        ("EdDSA", KEYS["RS256"][1], "not one for EdDSA"),
        ("RS256", KEYS["RS256"][0], "not a public key"),
        ("RS256", b"nothing", "not a public key"),
        ("RS256", None, "cannot be read"),
        ("HS256", KEYS["RS256"][1], "uses a secret"),
    ],
)
def test_key_file_has_to_fit_the_algorithm(tmp_path, algorithm, content, reason):
    path = tmp_path / "public.pem"
    path.unlink(missing_ok=True)
    if content is not None:
        path.write_bytes(content)
    settings = JwtConfig(algorithm=algorithm, public_key_file=str(path), issuer="i", audience="a")
    with pytest.raises(ConfigError, match=reason):
        Authenticator(AuthConfig(mode=AuthMode.TOKEN, jwt=settings), clock=ManualClock())


@each(
    "more",
    [
        {"jwt": JwtConfig(secret=SECRET)},
        {"jwt": JwtConfig(algorithm="HS256")},
        {"api_keys_file": "keys"},
        {"mtls_principal": True},
        {"super_admins": ("root",)},
    ],
)
def test_settings_of_auth_that_is_off_are_refused(more):
    """Somebody believes that callers are checked."""
    with pytest.raises(ConfigError, match="mode is 'none'"):
        Authenticator(AuthConfig(**more), clock=ManualClock())
    Authenticator(AuthConfig(audit_file="audit"), clock=ManualClock())
