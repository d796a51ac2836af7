"""The files of ``deploy/``, tested with the programs that this machine has for them."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import shutil
import ssl
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import jsonschema
import kubernetes_validate
import pytest
import yaml
from packaging.requirements import Requirement
from websockets.asyncio.client import connect

import afferent.builtin.frontend
import afferent.engines.http_upstream.client
import afferent.tier.main  # noqa: F401 - these modules declare metrics
from afferent import cli, config, errors
from afferent.operations.commands import health
from afferent.telemetry.registry import REGISTRY
from afferent.types import MiB
from tests.ports import free_port
from tests.server import Server, wait_until

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
DASHBOARD = DEPLOY / "grafana/afferent.json"
ALERTS = DEPLOY / "prometheus/alerts.yml"
PARTS = ("_bucket", "_sum", "_count")

needs = {
    tool: pytest.mark.skipif(shutil.which(tool) is None, reason=f"there is no {tool} here")
    for tool in ("promtool", "systemd-analyze", "nginx", "openssl")
}


def read(path: str) -> str:
    return (DEPLOY / path).read_text()


def queries() -> Iterator[str]:
    rules = [
        rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]
    ]
    yield from (rule["expr"] for rule in rules)
    panels = json.loads(DASHBOARD.read_text())["panels"]
    yield from (target["expr"] for panel in panels for target in panel["targets"])


# Prometheus and Grafana


def test_every_metric_of_dashboard_and_alerts_exists_with_its_labels() -> None:
    known = {metric.name: metric for metric in REGISTRY.declarations}
    num_seen = 0
    for query in queries():
        labels = {"le", "job", "instance"}
        for name in re.findall(r"\bafferent_\w+", query):
            base = next(
                (name.removesuffix(p) for p in PARTS if name.removesuffix(p) in known), name
            )
            assert base in known, query
            is_part = name != base
            assert is_part == (known[base].kind == "histogram"), query
            labels |= set(known[base].labels)
            num_seen += 1
        used = {
            word.strip() for by in re.findall(r"by \(([^)]*)\)", query) for word in by.split(",")
        }
        used |= set(re.findall(r"[{,]\s*(\w+)\s*[=!]~?", query))
        assert used <= labels, query
    assert num_seen > 40


def test_codes_in_alerts_are_those_of_errors() -> None:
    codes = {cls.code for cls in errors.walk()}
    for query in queries():
        for words in re.findall(r'(?:code|outcome)=~"([^"]+)"', query):
            assert set(words.split("|")) <= codes, query


def test_panels_do_not_overlap_and_have_names_of_their_own() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len({panel["title"] for panel in panels}) == len(panels)


@needs["promtool"]
def test_rules_are_rules() -> None:
    run("promtool", "check", "rules", str(ALERTS))
    run("promtool", "check", "config", str(DEPLOY / "prometheus/prometheus.yml"))


# Containers


def test_images_run_without_rights() -> None:
    for name in ("Containerfile", "Containerfile.vllm"):
        text = read(name)
        assert re.findall(r"^USER (.*)$", text, re.MULTILINE) == ["10001:10001"]
        for sources in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE):
            for source in sources.split():
                assert (ROOT / source).exists(), source
    services = yaml.safe_load(read("compose.yaml"))["services"]
    assert services["afferent"]["read_only"]
    for name in ("afferent", "vllm"):
        assert services[name]["cap_drop"] == ["ALL"]
        assert "sockets:/run/afferent" in services[name]["volumes"]


def test_what_compose_says_to_afferent_are_settings_of_ours() -> None:
    services = yaml.safe_load(read("compose.yaml"))["services"]
    known = config.declared(config.ServeConfig, *cli.engine_settings("vllm"))
    flags = flags_of(services["afferent"]["command"])
    assert set(flags) <= {one.flag for one in known.values()}
    variables = {one.variable for one in known.values()}
    said = re.findall(r"AFFERENT_\w+", read("Containerfile"))
    assert {*services["afferent"]["environment"], *said} <= variables
    mounted = [volume for name in ("prometheus", "grafana") for volume in services[name]["volumes"]]
    for source in (volume.split(":")[0] for volume in mounted if volume.startswith("./")):
        assert (DEPLOY / source).exists(), source


def test_pod_gives_settings_of_ours_and_shares_what_both_sides_need() -> None:
    deployment, service = yaml.safe_load_all(read("kubernetes.yaml"))
    pod = deployment["spec"]["template"]["spec"]
    assert pod["shareProcessNamespace"]
    assert pod["securityContext"]["runAsUser"] == 10001
    front, vllm = pod["containers"]
    composed = yaml.safe_load(read("compose.yaml"))["services"]
    assert front["args"][1:] == composed["afferent"]["command"][1:]
    assert vllm["args"][1:] == composed["vllm"]["command"][1:]
    variables = {one.variable for one in config.declared(config.ServeConfig).values()}
    assert {each["name"] for each in front["env"]} <= variables
    volumes = {volume["name"] for volume in pod["volumes"]}
    for container in (front, vllm):
        mounted = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
        assert mounted["/run/afferent"] == "sockets"
        assert set(mounted.values()) <= volumes
    grace_s = config.ServeConfig().drain_timeout_s
    assert pod["terminationGracePeriodSeconds"] > grace_s
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]


SERVICE_MONITOR = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "monitoring.coreos.com/v1"},
        "kind": {"const": "ServiceMonitor"},
        "metadata": {"type": "object"},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["selector", "endpoints"],
            "properties": {
                "selector": {"type": "object"},
                "endpoints": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "additionalProperties": False,
                        "required": ["port"],
                        "properties": {
                            "port": {"type": "string"},
                            "path": {"type": "string"},
                            "interval": {"type": "string", "pattern": "^[0-9]+(ms|s|m)$"},
                        },
                    },
                },
            },
        },
    },
}
"""The fields that the manifest uses, of a resource that Kubernetes itself does not know."""


def manifests(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(read(name)))


@pytest.mark.parametrize("name", ["kubernetes.yaml", "kubernetes-fleet.yaml"])
@pytest.mark.parametrize("version", ["1.29", "1.31", "1.34"])
def test_manifests_follow_the_schemas_of_kubernetes(name: str, version: str) -> None:
    for manifest in manifests(name):
        if manifest["kind"] == "ServiceMonitor":
            jsonschema.validate(manifest, SERVICE_MONITOR)
        else:
            kubernetes_validate.validate(manifest, version, strict=True)
            wrong = {**manifest, "spec": {**manifest["spec"], "replica": 2}}
            with pytest.raises(kubernetes_validate.ValidationError, match="replica"):
                kubernetes_validate.validate(wrong, version, strict=True)


def test_gateways_of_kubernetes_find_replicas_and_have_settings_of_ours() -> None:
    of_one, fleet = manifests("kubernetes.yaml"), manifests("kubernetes-fleet.yaml")
    named = {(each["kind"], each["metadata"]["name"]): each["spec"] for each in (*of_one, *fleet)}
    pods = {
        name: spec["template"]
        for (kind, name), spec in named.items()
        if kind == "Deployment" and spec["selector"]["matchLabels"]
    }
    labels = {name: pod["metadata"]["labels"] for name, pod in pods.items()}
    for (kind, name), spec in named.items():
        match kind:
            case "Service":
                assert spec["selector"] in labels.values(), name
            case "Deployment" | "PodDisruptionBudget":
                assert spec["selector"]["matchLabels"] in labels.values(), name
    replicas = named["Service", "afferent-replicas"]
    assert (replicas["clusterIP"], replicas["selector"]) == ("None", labels["afferent"])
    (gateway,) = pods["afferent-gateway"]["spec"]["containers"]
    known = config.declared(config.ServeConfig, *cli.engine_settings("openai"))
    flags = [word for word in gateway["args"] if word.startswith("--")]
    assert set(flags) <= {one.flag for one in known.values()}
    assert "dns+http://afferent-replicas:8000" in gateway["args"]
    variables = {one.variable for one in known.values()}
    assert {each["name"] for each in gateway["env"]} <= variables
    assert set(re.findall(r"AFFERENT_[A-Z_]*[A-Z]", read("kubernetes-fleet.yaml"))) <= variables | {
        "AFFERENT"  # of --prefix
    }
    grace_s = config.ServeConfig().drain_timeout_s
    assert pods["afferent-gateway"]["spec"]["terminationGracePeriodSeconds"] > grace_s
    (monitor,) = [each for each in fleet if each["kind"] == "ServiceMonitor"]
    monitored = [
        each
        for each in fleet
        if each["metadata"].get("labels") == monitor["spec"]["selector"]["matchLabels"]
    ]
    assert [each["metadata"]["name"] for each in monitored] == [
        "afferent-replicas",
        "afferent-gateway",
    ]
    (endpoint,) = monitor["spec"]["endpoints"]
    assert {port["name"] for each in monitored for port in each["spec"]["ports"]} == {
        endpoint["port"]
    }


def test_two_nodes_share_a_tier_and_a_secret() -> None:
    composed = yaml.safe_load(read("compose-tier.yaml"))
    services = composed["services"]
    known = {one.flag: one for one in config.declared(config.ServeConfig).values()}
    variables = {one.variable for one in known.values()}
    for name in ("one", "two"):
        node = services[name]
        flags = flags_of(node["command"])
        assert set(flags) <= known.keys()
        assert set(node["environment"]) <= variables
        assert (node["read_only"], node["cap_drop"]) == (True, ["ALL"])
    assert services["one"]["command"] == services["two"]["command"]
    assert "maxmemory" in " ".join(services["valkey"]["command"])
    assert services["valkey"]["networks"] == ["inside"]
    assert composed["networks"]["inside"] == {"internal": True}


def test_fleet_of_compose_is_that_of_kubernetes() -> None:
    composed = yaml.safe_load(read("compose-fleet.yaml"))
    services = composed["services"]
    known = config.declared(config.ServeConfig, *cli.engine_settings("openai")).values()
    for name in ("gateway", "replica"):
        flags = set(flags_of(services[name]["command"]))
        assert flags <= {one.flag for one in known}
        assert set(services[name]["environment"]) <= {one.variable for one in known}
        assert (services[name]["read_only"], services[name]["cap_drop"]) == (True, ["ALL"])
    (gateway,) = [
        container
        for each in yaml.safe_load_all(read("kubernetes-fleet.yaml"))
        if each["kind"] == "Deployment" and each["metadata"]["name"] == "afferent-gateway"
        for container in each["spec"]["template"]["spec"]["containers"]
    ]
    assert flags_of(services["gateway"]["command"]) == flags_of(gateway["args"])
    address = services["gateway"]["command"][3]
    assert address.removeprefix("dns+http://").partition(":")[0] in services
    assert "ports" not in services["replica"], "several of them can't have one port"
    tier = yaml.safe_load(read("compose-tier.yaml"))
    assert services["valkey"] == tier["services"]["valkey"]
    assert composed["networks"] == tier["networks"]


def flags_of(command: list[str]) -> list[str]:
    return [word for word in command if word.startswith("--")]


@pytest.mark.parametrize(
    ("command", "environ", "url"),
    [
        ("afferent serve", {}, "http://127.0.0.1:8000/health"),
        ("afferent serve", {"AFFERENT_PORT": "9000"}, "http://127.0.0.1:9000/health"),
        ("python /opt/afferent serve /m --port 9001", {"AFFERENT_PORT": "1"}, "127.0.0.1:9001/"),
        ("docker-init -- afferent serve --port=9002 --host 0.0.0.0", {}, "127.0.0.1:9002/health"),
        ("afferent serve --config FILE", {}, "http://[::1]:9003/health"),
        ("sleep 1", {"AFFERENT_HOST": "10.0.0.7"}, "http://10.0.0.7:8000/health"),
    ],
)
def test_health_check_asks_at_the_port_of_the_server(
    command: str,
    environ: dict[str, str],
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "file").write_text('port = 9003\nhost = "::"')
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    words = command.replace("FILE", str(tmp_path / "file")).split()
    assert url in health.health_url(words)


def test_health_check_of_the_image_asks_what_a_server_answers(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (given,) = re.findall(
        r"^HEALTHCHECK .* CMD \\\n *(\[.*\])$", read("Containerfile"), re.MULTILINE
    )
    assert json.loads(given) == ["python", "-m", "afferent.operations.commands.health"]
    port = server.url.rpartition(":")[2]
    monkeypatch.setattr(health, "_PROCESSES", tmp_path)
    for pid, container in (("1", "a"), ("11", "b"), ("12", "a"), ("self", "a")):
        (tmp_path / pid / "ns").mkdir(parents=True)
        (tmp_path / pid / "ns/mnt").symlink_to(container)
    # Containers may share the pids, and process 1 is another server's.
    (tmp_path / "1/cmdline").write_text("\0".join(["/bin/vllm", "serve", "--port", "1", ""]))
    (tmp_path / "11/cmdline").write_text("\0".join(["afferent", "serve", "--port", "1", ""]))
    for verb, number, status in (("serve", port, 0), ("render", port, 0), ("serve", "1", 1)):
        words = ["/bin/python", "/bin/afferent", verb, "--port", number, ""]
        (tmp_path / "12/cmdline").write_text("\0".join(words))
        assert health.main() == status
    (tmp_path / "12/cmdline").write_text("\0".join(["afferent", "serve", "--port", "0", ""]))
    assert health.main() == 1


def test_the_lock_has_all_that_is_declared() -> None:
    """``make lock`` writes every package that the server needs, in one version."""
    locked = dict(re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", read("requirements.lock"), re.MULTILINE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    own = (*extras["server"], *extras["engine"], *extras["tier"])
    for line in (*project["dependencies"], *own):
        wanted = Requirement(line)
        if wanted.name == project["name"]:  # another extra of this package
            assert wanted.extras <= extras.keys()
            continue
        names = {name.lower().replace("_", "-"): version for name, version in locked.items()}
        version = names[wanted.name.lower().replace("_", "-")]
        assert wanted.specifier.contains(version, prereleases=True), line


def test_lock_has_hashes_of_every_package() -> None:
    """``pip install --require-hashes`` refuses a file without hashes."""
    packages = re.split(r"^(?=[a-z0-9])", read("requirements.lock"), flags=re.MULTILINE)[1:]
    assert len(packages) > 50
    for package in packages:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", package), package


def test_image_installs_all_but_torch_by_hash(tmp_path: Path) -> None:
    """The filter in the Containerfile removes torch and its dependencies, with their hashes."""
    text = read("Containerfile")
    assert "pip install --require-hashes --no-deps --requirement /tmp/others" in text
    (program,) = re.findall(r"awk '([^']*)' deploy/requirements.lock", text)
    left = run("awk", program, str(DEPLOY / "requirements.lock"))
    names = set(re.findall(r"^([a-z0-9._-]+)==", left, re.MULTILINE))
    locked = set(re.findall(r"^([a-z0-9._-]+)==", read("requirements.lock"), re.MULTILINE))
    gone = locked - names
    assert "torch" in gone
    assert all(name.startswith(("torch", "nvidia-", "cuda-", "triton")) for name in gone)
    hashes = re.findall(r"--hash", left)
    assert 0 < len(hashes) < len(re.findall(r"--hash", read("requirements.lock")))
    for package in re.split(r"^(?=[a-z0-9])", left, flags=re.MULTILINE)[1:]:
        assert "--hash=" in package, package


# systemd


@needs["systemd-analyze"]
def test_the_unit_is_one(tmp_path: Path) -> None:
    """The unit is valid, apart from the user and the installation path, which the test replaces."""
    unit = tmp_path / "afferent.service"
    here = {"/opt/afferent/bin/afferent": sys.executable}
    here |= {"User=afferent": "User=root", "Group=afferent": "Group=root"}
    text = read("afferent.service")
    for there, name in here.items():
        assert there in text
        text = text.replace(there, name)
    unit.write_text(text)
    said = run("systemd-analyze", "verify", "--man=no", str(unit))
    assert "afferent.service:" not in said, said


def test_the_unit_allows_what_confinement_needs() -> None:
    text = read("afferent.service")
    assert re.search(r"^SystemCallFilter=@system-service seccomp$", text, re.MULTILINE)
    for command in re.findall(r"^Exec\w+=\S+ (.*)$", text, re.MULTILINE):
        words = shlex.split(command.replace("$MAINPID", "1"))
        if words[0] == "restart":
            assert words[1] in ("frontends", "engine")
        else:
            assert words[:2] in (["config", "check"], ["serve", "--config"])


# nginx


def test_nginx_reports_from_where_a_request_comes() -> None:
    headers = dict(re.findall(r"proxy_set_header (X-\S+) +(\S+);", read("nginx.conf")))
    assert headers == {
        "X-Forwarded-For": "$proxy_add_x_forwarded_for",
        "X-Forwarded-Host": "$host",
        "X-Forwarded-Proto": "$scheme",
    }


@needs["nginx"]
@needs["openssl"]
def test_behind_nginx(server: Server, tmp_path: Path) -> None:
    """The example works with local ports and files: TLS outside, and streams without delay."""
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    run(
        *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
        *("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"),
        *("-keyout", str(key), "-out", str(certificate)),
    )
    port = free_port()
    text = read("nginx.conf")
    changes = {"/etc/afferent/tls/certificate.pem": str(certificate)}
    changes |= {"/etc/afferent/tls/key.pem": str(key), "listen 8443 ssl": f"listen {port} ssl"}
    changes |= {"127.0.0.1:8000": server.url.removeprefix("http://")}
    for there, here in changes.items():
        assert there in text
        text = text.replace(there, here)
    head = f"pid {tmp_path}/pid;\ndaemon off;\n"
    paths = "".join(
        f"{name}_temp_path {tmp_path}/{name};\n"
        for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config = tmp_path / "nginx.conf"
    config.write_text(head + text.replace("http {", "http {\n" + paths))
    command = ["nginx", "-e", "stderr", "-p", str(tmp_path), "-c", str(config)]
    run(*command, "-t")
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as nginx:
        try:
            trusted = ssl.create_default_context(cafile=str(certificate))
            with httpx.Client(base_url=f"https://localhost:{port}", verify=trusted) as client:
                wait_until(lambda: answers(client))
                ask_through(client)
                # Longer than another body may be; this server stores no files.
                assert client.post("/v1/files", content=bytes(65 * MiB)).status_code == 404
            url = f"wss://localhost:{port}/v1/realtime"
            assert asyncio.run(first_event(url, trusted))["type"] == "session.created"
        finally:
            nginx.terminate()


async def first_event(url: str, trusted: ssl.SSLContext) -> dict[str, Any]:
    """Return the first event of a live session.

    One thread uses the connection. `websockets.sync` reads TLS in a second one, and `ssl` of Python
    3.11 sometimes loses what the first one writes: nginx waits for a request that was never sent.
    """
    async with asyncio.timeout(30), connect(url, ssl=trusted) as live:
        event: dict[str, Any] = json.loads(await live.recv())
    return event


def ask_through(client: httpx.Client) -> None:
    body: dict[str, Any] = {"model": "shapes", "prompt": "a green", "max_tokens": 3}
    for _ in range(3):
        assert client.post("/v1/completions", json=body).status_code == 200
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
        events = [line for line in stream.iter_lines() if line]
    assert events[-1] == "data: [DONE]"
    asked = {"model": "shapes", "prompt": "a green"}
    tokens = client.post("/tokenize", json=asked).json()["tokens"]
    assert client.post("/detokenize", json={"model": "shapes", "tokens": tokens}).status_code == 200
    for inside in ("/metrics", "/ready", "/tokenize/x", "/healthy"):
        assert client.get(inside).status_code == 404


def answers(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return said
