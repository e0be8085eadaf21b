"""How the project is packaged and released: metadata and workflows."""

import re
import tomllib
from pathlib import Path

import yaml

from tests.support.cases import each

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z]+):", MAKEFILE, re.MULTILINE))
WORKFLOWS = {
    path.stem: yaml.safe_load(path.read_text())
    for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))
}
# For those who work on the project, and the engine that is somebody's deliberate choice.
NOT_FOR_ALL = {"all", "dev", "docs", "fuzz", "native"}


def steps():
    return [
        (f"{name}.{job}", step)
        for name, workflow in WORKFLOWS.items()
        for job, body in workflow["jobs"].items()
        for step in body["steps"]
    ]


def python_versions(name):
    """The versions that a workflow's jobs run on."""
    text = (ROOT / ".github" / "workflows" / f"{name}.yml").read_text()
    return {f"3.{minor}" for minor in re.findall(r'"3\.(\d+)"', text)}


# -- metadata -----------------------------------------------------------------------------------


def test_all_has_every_extra_of_users():
    (line,) = EXTRAS["all"]
    listed = re.fullmatch(r"ister\[([\w,]+)\]", line)[1].split(",")
    assert listed == sorted(set(EXTRAS) - NOT_FOR_ALL)


def test_python_versions_are_those_that_workflows_run():
    stated = {
        version
        for line in PROJECT["classifiers"]
        for version in re.findall(r"^Programming Language :: Python :: (3\.\d+)$", line)
    }
    assert stated == {"3.11", "3.12", "3.13", "3.14"}
    assert PROJECT["requires-python"] == ">=3.11"
    assert python_versions("test") | python_versions("nightly") == stated


# -- workflows ----------------------------------------------------------------------------------


def test_workflows_call_the_targets_that_people_call():
    called = {
        target
        for _, step in steps()
        for target in re.findall(r"\bmake ([a-z]+)", step.get("run", ""))
    }
    assert called <= TARGETS
    assert called >= {"test", "nightly", "dist", "images"}


@each("name", WORKFLOWS)
def test_workflows_have_few_rights_and_end(name):
    workflow = WORKFLOWS[name]
    assert workflow["name"] == name
    assert workflow["permissions"] == {"contents": "read"}
    # YAML takes the key `on` for a boolean.
    assert True in workflow
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] < 360
        assert re.fullmatch(r"ubuntu-\d\d\.\d\d", job["runs-on"])
        # What a step runs comes from the repository, never from a title or a branch's name.
        for step in job["steps"]:
            assert "${{" not in step.get("run", ""), step


def test_release_builds_before_it_publishes():
    jobs = WORKFLOWS["release"]["jobs"]
    assert set(jobs["publish"]["needs"]) == {"dist", "images"}
    assert jobs["publish"]["if"] == "github.ref_type == 'tag'"
    for step in jobs["images"]["steps"]:
        if "push" in step.get("run", "") or "login" in step.get("uses", ""):
            assert step["if"] == "github.ref_type == 'tag'"


def test_image_targets_are_stages_of_the_dockerfile():
    dockerfile = (ROOT / "deploy" / "docker" / "Dockerfile").read_text()
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", dockerfile, re.MULTILINE))
    targets = set(re.findall(r"docker build .*--target (\S+)", MAKEFILE))
    assert targets == {"broker", "spark"} <= stages
