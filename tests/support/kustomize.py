"""What `kubectl kustomize` makes of a directory, for the few features that `deploy/` uses.

Tests need no kubectl that way; where there is one, a test compares the two.
"""

import yaml


def render(directory):
    """The resources of a kustomization, by kind and name."""
    settings = yaml.safe_load((directory / "kustomization.yaml").read_text())
    found = {}
    for name in (*settings.pop("resources"), *settings.pop("components", ())):
        path = (directory / name).resolve()
        if path.is_dir():
            found |= render(path)
        else:
            for one in yaml.safe_load_all(path.read_text()):
                found[one["kind"], one["metadata"]["name"]] = one
    for made in settings.pop("configMapGenerator", ()):
        assert made.get("behavior", "create") in ("create", "replace")
        found["ConfigMap", made["name"]] = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": made["name"], **made["options"]},
            "data": {name: (directory / name).read_text() for name in made["files"]},
        }
    for patch in settings.pop("patches", ()):
        target = found[patch["target"]["kind"], patch["target"]["name"]]
        for step in yaml.safe_load(patch["patch"]):
            _apply(target, step)
    for image in settings.pop("images", ()):
        for one in found.values():
            for container in _containers(one):
                name, _, _ = container["image"].partition(":")
                if name == image["name"]:
                    container["image"] = f"{image['newName']}:{image['newTag']}"
    if namespace := settings.pop("namespace", None):
        for one in found.values():
            one["metadata"]["namespace"] = namespace
    assert settings.pop("generatorOptions", {"disableNameSuffixHash": True}) == {
        "disableNameSuffixHash": True
    }
    assert set(settings) == {"apiVersion", "kind"}, f"not known here: {settings}"
    return found


def _containers(resource):
    spec = resource.get("spec", {})
    return spec.get("template", {}).get("spec", {}).get("containers", ())


def _apply(target, step):
    """One step of a JSON patch (RFC 6902): replace or remove."""
    *way, last = [int(part) if part.isdigit() else part for part in step["path"][1:].split("/")]
    for part in way:
        target = target[part]
    assert last in target or last in range(len(target)), step
    if step["op"] == "remove":
        del target[last]
    else:
        assert step["op"] == "replace", step
        target[last] = step["value"]
