"""What one JSON Schema admits and another does not."""

import json

from ister.broker.schemas.definitions import find_incompatibilities
from ister.broker.schemas.json_rules import JsonComparison
from ister.broker.schemas.json_schema import read_json_schema
from ister.topic.schema_kinds import CompatibilityMode
from tests.support.cases import each


def problems(reader, writer):
    # As they come from JSON: no part of a schema is the same object as another.
    reader, writer = (json.loads(json.dumps(schema)) for schema in (reader, writer))
    return JsonComparison(reader, writer).run()


def thing(properties, required=(), **more):
    return {"type": "object", "properties": properties, "required": list(required), **more}


TEXT, WHOLE, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}


@each(
    ("old", "new", "backward", "forward"),
    [
        # What Danube's own tests say.
        (thing({"a": TEXT}, "a"), thing({"a": TEXT, "b": TEXT}, "a"), True, True),
        (thing({"a": TEXT, "b": WHOLE}, "ab"), thing({"a": TEXT}, "a"), False, False),
        (thing({"a": TEXT, "b": TEXT}, "a"), thing({"a": TEXT}, "a"), True, True),
        (thing({"a": TEXT}, "a"), thing({"a": TEXT, "b": TEXT}, "ab"), False, False),
        # Required and not.
        (thing({"a": TEXT, "b": TEXT}, "a"), thing({"a": TEXT, "b": TEXT}, "ab"), False, True),
        (thing({"a": TEXT, "b": TEXT}, "ab"), thing({"a": TEXT, "b": TEXT}, "a"), True, False),
        # Types.
        (thing({"a": WHOLE}), thing({"a": NUMBER}), True, False),
        (thing({"a": NUMBER}), thing({"a": WHOLE}), False, True),
        (thing({"a": TEXT}), thing({"a": WHOLE}), False, False),
        (thing({"a": TEXT}), thing({"a": {"type": ["string", "null"]}}), True, False),
        (thing({"a": TEXT}), thing({"a": {}}), True, False),
        (thing({"a": TEXT}), thing({"a": True}), True, False),
        (thing({"a": TEXT}), thing({"a": False}), False, True),
        # Enumerations.
        ({"enum": ["a", "b"]}, {"enum": ["a", "b", "c"]}, True, False),
        ({"enum": [1, 2]}, {"enum": [2.0, 1]}, True, True),
        ({"enum": ["a"]}, {"type": "string"}, True, False),
        ({"const": 1}, {"const": 2}, False, False),
        ({"const": 1}, {"enum": [1, 2]}, True, False),
        # Bounds.
        ({"minimum": 5}, {"minimum": 1}, True, False),
        ({}, {"maxLength": 5}, False, True),
        ({}, {"minLength": 0}, True, True),
        ({"multipleOf": 10}, {"multipleOf": 5}, True, False),
        ({"uniqueItems": True}, {}, True, False),
        ({"exclusiveMaximum": True, "maximum": 5}, {"maximum": 5}, True, False),
        # Further properties.
        (thing({"a": TEXT}), thing({"a": TEXT}, additionalProperties=False), False, True),
        (
            thing({"a": TEXT}, additionalProperties=False),
            thing({"a": TEXT, "b": TEXT}, additionalProperties=False),
            True,
            False,
        ),
        (
            thing({}, additionalProperties=WHOLE),
            thing({"a": TEXT}, additionalProperties=WHOLE),
            False,
            False,
        ),
        (
            thing({}, additionalProperties=WHOLE),
            thing({}, additionalProperties=NUMBER),
            True,
            False,
        ),
        # All the way down.
        (thing({"a": thing({"b": TEXT})}), thing({"a": thing({"b": WHOLE})}), False, False),
        (thing({"a": thing({"b": TEXT})}), thing({"a": thing({"b": TEXT}, "b")}), False, True),
        ({"items": WHOLE}, {"items": NUMBER}, True, False),
        ({"prefixItems": [WHOLE]}, {"prefixItems": [NUMBER]}, True, False),
        (
            {"items": [WHOLE], "additionalItems": TEXT},
            {"prefixItems": [WHOLE], "items": TEXT},
            True,
            True,
        ),
        # Alternatives.
        ({"anyOf": [TEXT, WHOLE]}, {"anyOf": [TEXT, WHOLE, {"type": "null"}]}, True, False),
        ({"anyOf": [TEXT, WHOLE]}, {"type": ["string", "integer"]}, True, True),
        (TEXT, {"oneOf": [TEXT, WHOLE]}, True, False),
        # What cannot be judged.
        ({"not": TEXT}, {"not": WHOLE}, False, False),
        ({"pattern": "^a"}, {}, True, False),
        (
            {"if": TEXT, "then": {"minLength": 1}},
            {"if": TEXT, "then": {"minLength": 1}},
            True,
            True,
        ),
        ({"allOf": [TEXT]}, {"allOf": [TEXT, {"minLength": 1}]}, False, True),
        # Remarks.
        ({"title": "a", "type": "string"}, {"description": "b", "type": "string"}, True, True),
        (True, {}, True, True),
    ],
)
def test_rules(old, new, backward, forward):
    assert (not problems(new, old), not problems(old, new)) == (backward, forward)
    assert not problems(old, old)
    assert not problems(new, new)


def test_references_are_followed_on_both_sides():
    old = {"$defs": {"n": thing({"v": WHOLE, "next": {"$ref": "#/$defs/n"}})}, "$ref": "#/$defs/n"}
    new = {"$defs": {"n": thing({"v": TEXT, "next": {"$ref": "#/$defs/n"}})}, "$ref": "#/$defs/n"}
    assert not problems(old, old)
    assert any("/v" in one for one in problems(new, old))
    assert problems({"allOf": [{"$ref": "#/$defs/n"}], **_defs(new)}, {**old, **_defs(old)})
    hidden = {"not": {"$ref": "#/$defs/n"}}
    assert not problems({**hidden, **_defs(old)}, {**hidden, **_defs(old)})
    assert problems({**hidden, **_defs(new)}, {**hidden, **_defs(old)})


def test_part_that_did_not_fit_in_an_alternative_does_not_fit_elsewhere():
    used = {"$ref": "#/$defs/x"}
    for old, new, problem in (
        (thing({"v": TEXT}), thing({"v": WHOLE}), "/b/v: string is not accepted, only integer"),
        (TEXT, False, "/b: nothing is accepted now"),
    ):
        writer = {**thing({"a": used, "b": used}), "$defs": {"x": old}}
        reader = {**thing({"a": {"anyOf": [used, {}]}, "b": used}), "$defs": {"x": new}}
        assert problems(reader, writer) == [problem]


def _defs(schema):
    return {"$defs": schema["$defs"]}


def test_circle_of_references_ends():
    loop = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    assert problems(loop, loop)


def test_comparison_is_bounded():
    branches = [{"properties": {f"p{index}": {"minLength": index}}} for index in range(400)]
    assert len(problems({"anyOf": branches}, {"anyOf": branches[::-1]})) < 100
    changed = {"properties": {f"p{index}": TEXT for index in range(500)}}
    other = {"properties": {f"p{index}": WHOLE for index in range(500)}}
    assert len(problems(changed, other)) == 50


def test_modes_ask_for_their_directions():
    old = read_json_schema(json.dumps(thing({"a": WHOLE})).encode())
    new = read_json_schema(json.dumps(thing({"a": NUMBER})).encode())
    found = {mode: bool(find_incompatibilities(old, new, mode)) for mode in CompatibilityMode}
    assert found == {
        CompatibilityMode.NONE: False,
        CompatibilityMode.BACKWARD: False,
        CompatibilityMode.FORWARD: True,
        CompatibilityMode.FULL: True,
    }
    assert find_incompatibilities(old, new, CompatibilityMode.FULL)[0].startswith("forward: /a")
