"""Credentials: the JWT matrix, API keys, certificates, and headers that mean nothing."""

import base64
import hashlib
import hmac
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
from tests.support.cases import each
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
        settings = {"algorithm": algorithm, "issuer": ISSUER, "audience": AUDIENCE}
        if algorithm in KEYS:
            self.key, public = KEYS[algorithm]
            path = directory / "public.pem"
            path.write_bytes(public)
            settings["public_key_file"] = str(path)
        else:
            self.key = SECRET
            settings["secret"] = SECRET
        jwt_config = JwtConfig(**{**settings, **more})
        config = AuthConfig(mode=AuthMode.TOKEN, jwt=jwt_config)
        self.authenticator = Authenticator(config, clock=self.clock)

    def claims(self, **more):
        claims = {"sub": "alice", "iss": ISSUER, "aud": AUDIENCE, "exp": self.now + 600, **more}
        return {name: value for name, value in claims.items() if value is not None}

    def sign(self, headers=None, **claims):
        return jwt.encode(
            self.claims(**claims), self.key, algorithm=self.algorithm, headers=headers
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


def test_token_of_ours_is_taken(issuer):
    token = make_token(
        "loader",
        algorithm=issuer.algorithm,
        key=issuer.key,
        issuer=ISSUER,
        audience=AUDIENCE,
        lifetime_seconds=60,
        clock=issuer.clock,
    )
    assert issuer.check(token).name == "loader"


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
def test_token_of_danubes_tools_is_taken_by_settings_without_an_audience(spelled, kind, caplog):
    caplog.clear()
    with caplog.at_level("WARNING"):
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


def test_settings_with_an_audience_warn_of_nothing(plain, caplog):
    assert not caplog.records


@each("value", ["9999999999", True, [1], {}, 1e400, 10**400])
@each("name", ["exp", "nbf", "iat"])
def test_time_that_is_no_number_is_refused(plain, name, value):
    token = forge({"alg": "HS256"}, plain.claims(**{name: value}), SECRET.encode())
    with pytest.raises(UnauthenticatedError):
        plain.check(token)


@each("name", ["sub", "iss", "aud"])
@each("value", [7, True, {"a": 1}, [["x"]], [ISSUER]])
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
    parts = [
        encode(json.dumps(part).encode()) for part in ({"alg": word, "typ": "JWT"}, issuer.claims())
    ]
    for signature in (b"", b"AAAA"):
        with pytest.raises(UnauthenticatedError):
            issuer.check(b".".join([*parts, signature]).decode())


@each("algorithm", ASYMMETRIC)
def test_public_key_is_no_secret(tmp_path, algorithm):
    """The confusion of algorithms: an HMAC keyed with what everybody knows."""
    issuer = Issuer(algorithm, tmp_path)
    public = KEYS[algorithm][1]
    for word in ("HS256", algorithm):
        for key in (public, public.strip()):
            with pytest.raises(UnauthenticatedError):
                issuer.check(forge({"alg": word}, issuer.claims(), key))


def test_other_algorithm_of_the_same_key_is_refused(tmp_path):
    issuer = Issuer("RS256", tmp_path)
    token = jwt.encode(issuer.claims(), issuer.key, algorithm="RS512")
    with pytest.raises(UnauthenticatedError, match="another algorithm"):
        issuer.check(token)
    plain = Issuer("HS256", tmp_path)
    with pytest.raises(UnauthenticatedError, match="another algorithm"):
        plain.check(jwt.encode(plain.claims(), SECRET, algorithm="HS512"))


def test_token_of_another_key_is_refused(issuer):
    key = signing_keys(issuer.algorithm)[0] if issuer.algorithm in KEYS else SECRET[::-1]
    token = jwt.encode(issuer.claims(), key, algorithm=issuer.algorithm)
    with pytest.raises(UnauthenticatedError, match="signature"):
        issuer.check(token)


def test_changed_token_is_refused(issuer):
    """Every character of the content counts."""
    token = issuer.sign()
    head, body, signature = token.split(".")
    changed = encode(json.dumps(issuer.claims(sub="root")).encode()).decode()
    for bad in (f"{head}.{changed}.{signature}", f"{head}.{body}.", f"{head}.{body}", token[:-8]):
        with pytest.raises(UnauthenticatedError):
            issuer.check(bad)


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
    """Whatever is sent, the answer is UnauthenticatedError: deep JSON, bad UTF-8, long texts."""
    deep = encode(b'{"alg":"HS256","a":' + b"[" * 2400 + b"]" * 2400 + b"}").decode()
    hostile = [
        "",
        ".",
        "..",
        "...",
        "a.b.c",
        "a" * 9000,
        f"{deep}.e30.AA",
        f"{encode(b'[]').decode()}.e30.AA",
        f"{encode(b'{{').decode()}.e30.AA",
        encode(b'{"alg": 5}').decode() + ".e30.AA",
        encode(b'{"alg": null}').decode() + ".e30.AA",
        encode(b'{"alg": ["HS256"]}').decode() + ".e30.AA",
        encode(b"\xff\xfe").decode() + ".e30.AA",
        "\udc80.\udc80.\udc80",
        "ä.ö.ü",
    ]
    for text in hostile:
        with pytest.raises(UnauthenticatedError):
            plain.check(text)
    deep_claims = b'{"alg":"HS256"}', b'{"a":' + b"[" * 2000 + b"]" * 2000 + b"}"
    content = b".".join(map(encode, deep_claims))
    signed = content + b"." + encode(hmac.digest(SECRET.encode(), content, hashlib.sha256))
    with pytest.raises(UnauthenticatedError):
        plain.check(signed.decode())


def test_errors_never_quote_the_token(plain):
    canary = "CANARY" * 8
    for token in (
        canary,
        f"{canary}.{canary}.{canary}",
        plain.sign(iss=canary),
        plain.sign(aud=canary),
        plain.sign(sub=f"{canary}\n"),
        forge({"alg": canary}, plain.claims(), b"x"),
        jwt.encode(plain.claims(), canary, algorithm="HS256"),
    ):
        with pytest.raises(UnauthenticatedError) as caught:
            plain.check(token)
        assert canary not in f"{caught.value} {caught.value!r}"
        assert token not in f"{caught.value} {caught.value!r}"


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


def test_internal_broker_header_changes_nothing(plain):
    headers = {"authorization": f"bearer  {plain.sign()}", "x-danube-internal-broker": "broker-1"}
    principal = plain.authenticator.authenticate(headers)
    assert (principal.name, principal.kind) == ("alice", "user")


def test_collected_headers_are_credentials_alone():
    pairs = [("Authorization", "Bearer x"), ("X-Danube-Internal-Broker", "b"), ("te", "trailers")]
    assert collect_headers(pairs) == {"authorization": "Bearer x"}
    for bad in (
        [("authorization", "Bearer x"), ("Authorization", "Bearer x")],
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
    now = clock.now_ns() / 1e9
    key, line = make_api_key("loader", expires_at=now + 10)
    path = tmp_path / "keys"
    path.write_text(line)
    config = AuthConfig(mode=AuthMode.TOKEN, api_keys_file=str(path))
    authenticator = Authenticator(config, clock=clock)
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
    principal = on.authenticate({}, certificate=loader)
    assert (principal.name, principal.kind, principal.via) == (
        "spiffe://example/loader",
        "service",
        "mtls",
    )
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


def _name(value: object) -> str:
    """Of a case. Keys are new each time, and no names: all processes must know a test by one."""
    return value if isinstance(value, str) else type(value).__name__


@each(
    ("settings", "reason"),
    [
        ({}, "no way to authenticate"),
        ({"secret": SECRET}, "no algorithm"),
        ({"algorithm": "none", "issuer": "i", "audience": "a"}, "algorithm 'none'"),
        ({"algorithm": "hs256", "issuer": "i", "audience": "a"}, "algorithm 'hs256'"),
        ({"algorithm": "HS256", "secret": SECRET, "audience": "a"}, "needs an issuer"),
        ({"algorithm": "HS256", "issuer": "i", "audience": "a"}, "has 0 bytes"),
        (
            {"algorithm": "HS256", "secret": "x" * 31, "issuer": "i", "audience": "a"},
            "has 31 bytes",
        ),
        (
            {"algorithm": "HS512", "secret": "x" * 63, "issuer": "i", "audience": "a"},
            "has 63 bytes",
        ),
        (
            {
                "algorithm": "HS256",
                "secret": KEYS["RS256"][1].decode(),
                "issuer": "i",
                "audience": "a",
            },
            "PEM",
        ),
        ({"algorithm": "RS256", "issuer": "i", "audience": "a"}, "requires"),
        (
            {"algorithm": "RS256", "secret": SECRET, "issuer": "i", "audience": "a"},
            "uses a public key",
        ),
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
