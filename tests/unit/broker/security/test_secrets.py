"""Canaries: whatever happens, no secret gets into logs, errors, reprs, audit lines or metrics."""

import logging

import pytest

from ister.base.clock import SystemClock
from ister.broker.security.guard import entered
from ister.broker.security.rights import Permission
from ister.broker.security.tls import ServerTls
from ister.config import load_config
from ister.errors import IsterError
from tests.support.certificates import LOCAL_NAMES, Authority
from tests.support.security import SECRET, GuardRig, auth_settings


def test_no_secret_gets_out(tmp_path, caplog):
    """Goal: grep for canaries in all that can be seen, after everything that can go wrong did."""
    caplog.set_level(logging.DEBUG)
    seen = []
    authority = Authority()
    issued = authority.issue("broker", names=LOCAL_NAMES)
    cert_file, key_file = issued.write(tmp_path, "broker")
    settings = {
        "storage": {"mode": "memory"},
        "broker": {
            "auth": auth_settings(tmp_path),
            "tls": {"cert_file": cert_file, "key_file": key_file},
        },
    }
    config = load_config(settings, environment={})
    seen += [repr(config), str(config)]
    tls = ServerTls.open(config.broker.tls, clock=SystemClock())
    seen += [repr(tls), repr(tls.material())]

    with GuardRig(tmp_path) as rig:
        key = rig.api_key("loader")
        token = rig.token("alice", lifetime_seconds=100)
        other = rig.token("bob", lifetime_seconds=1)
        broken = token[:-4] + "AAAA"
        secrets = [SECRET, key, token, other, broken, issued.key.decode()]
        for headers in (
            {"authorization": f"Bearer {token}"},
            {"authorization": f"Bearer {key}"},
            {"x-api-key": key},
            {"x-api-key": f"{key}x"},
            {"authorization": f"Bearer {broken}"},
            {"authorization": token},
            {"authorization": f"Basic {key}"},
            {"authorization": f"Bearer {token}", "x-api-key": key},
            {"authorization": f"Bearer {SECRET}"},
        ):
            try:
                caller = rig.guard.enter(headers, action="Send", is_stream=True)
                seen += [repr(caller), repr(caller.principal), str(caller.principal)]
                with entered(caller):
                    rig.guard.check(caller.principal, Permission.MANAGE_TOPIC, topic="/a/b")
            except IsterError as error:
                seen += [repr(error), str(error), repr(error.__cause__), repr(vars(error))]
        rig.clock.advance(100)
        with pytest.raises(IsterError) as caught:
            rig.guard.enter({"authorization": f"Bearer {token}"})
        seen.append(str(caught.value))
        seen += [repr(rig.guard), repr(vars(rig.guard)), repr(vars(rig.guard._authenticator))]
        (tmp_path / "api-keys").write_text(f"loader {key}\n")
        rig.clock.advance(1)
        with pytest.raises(IsterError):
            rig.guard.enter({"x-api-key": key})
    with pytest.raises(IsterError) as caught:
        GuardRig(tmp_path)
    seen.append(str(caught.value))
    (tmp_path / "api-keys").write_text("")
    with pytest.raises(IsterError) as caught:
        GuardRig(tmp_path, jwt={"algorithm": "RS256", "secret": SECRET, "issuer": "i"})
    seen.append(str(caught.value))
    with pytest.raises(IsterError) as caught:
        load_config({"broker": {"auth": {"jwt": {"secret": [SECRET]}}}}, environment={})
    seen.append(str(caught.value))

    seen.append((tmp_path / "audit.jsonl").read_text())
    seen += [f"{record.getMessage()} {vars(record)}" for record in caplog.records]
    text = "\n".join(seen)
    assert len(rig.audited()) > 3, "the refusals were noted"
    for secret in secrets:
        assert secret not in text
        # Nor a good part of it.
        assert secret[8:40] not in text
