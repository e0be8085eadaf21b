"""Which schema reads which: JSON Schema and Avro against models that remember nothing.

The comparisons remember pairs of parts that they have compared, as schemas may be recursive. The
models follow only the pairs that they are inside of, which takes as long as it takes.
"""

import io
import itertools
import json
import random

import fastavro

from ister.broker.schemas.avro import read_avro
from ister.broker.schemas.json_rules import JsonComparison
from tests.support.scale import scaled

SEEDS = range(scaled(500, 100_000))
STEPS_MAX = 2_000
"""Of a model: schemas that take more are left out."""
NAMES = ("A", "B", "C")


# -- JSON Schema ------------------------------------------------------------------------------


def a_part(chance, depth=2):
    """Of a schema: recursive, with alternatives; properties are never required."""
    kind = chance.random()
    if kind < 0.35 or not depth:
        return {"$ref": f"#/$defs/{chance.choice(NAMES)}"}
    if kind < 0.55:
        return {"anyOf": [a_part(chance, depth - 1) for _ in range(2)]}
    if kind < 0.7:
        return {"type": chance.choice(("string", "integer", "object"))}
    return an_object(chance, depth)


def an_object(chance, depth=2):
    names = chance.sample("xyz", chance.randint(1, 3))
    properties = {name: a_part(chance, depth - 1) for name in sorted(names)}
    return {"type": "object", "properties": properties}


def changed(chance, value):
    """A schema with another type somewhere."""
    text = json.dumps(value)
    for one, other in (("string", "integer"), ("integer", "number")):
        if f'"{one}"' in text and chance.random() < 0.4:
            text = text.replace(f'"{one}"', f'"{other}"', 1)
    return json.loads(text)


class TooLargeError(Exception):
    """A model has taken too many steps."""


def accepts(reader, writer, roots, steps, inside=()):
    """Whether everything written for `writer` is accepted, as the rules have it."""
    if next(steps) > STEPS_MAX:
        raise TooLargeError
    reader, writer = (
        root["$defs"][part["$ref"][-1]] if "$ref" in part else part
        for part, root in zip((reader, writer), roots, strict=True)
    )
    pair = id(reader), id(writer)
    if pair in inside:
        return True
    inside = (*inside, pair)
    if "anyOf" in writer and "anyOf" not in reader:
        return all(accepts(reader, one, roots, steps, inside) for one in writer["anyOf"])
    if "anyOf" in reader:
        written = writer.get("anyOf", [writer])
        return all(
            any(accepts(branch, one, roots, steps, inside) for branch in reader["anyOf"])
            for one in written
        )
    if reader["type"] != writer["type"]:
        return (reader["type"], writer["type"]) == ("number", "integer")
    known, other = reader.get("properties", {}), writer.get("properties", {})
    return all(
        accepts(known[name], other[name], roots, steps, inside) for name in known.keys() & other
    )


def test_json_schemas_are_compared_as_the_model_does():
    verdicts = {True: 0, False: 0}
    for seed in SEEDS:
        chance = random.Random(seed)
        definitions = {name: an_object(chance) for name in NAMES}
        writer = {**an_object(chance), "$defs": definitions}
        reader = changed(chance, writer)
        try:
            wanted = accepts(reader, writer, (reader, writer), itertools.count())
        except TooLargeError:
            continue
        problems = JsonComparison(reader, writer).run()
        assert (not problems) == wanted, f"seed {seed}: {problems}\n{reader}\n{writer}"
        verdicts[wanted] += 1
    assert min(verdicts.values()) > len(SEEDS) / 10, verdicts


# -- Avro -------------------------------------------------------------------------------------


def a_type(chance, defined, depth=2):
    """Of a field: primitive types, records that may be recursive, and unions of them."""
    kind = chance.random()
    if kind < 0.3 or not depth:
        return chance.choice(("int", "long", "string"))
    if kind < 0.6:
        kinds = chance.sample(("null", "int", "string", "record", "another"), chance.randint(2, 4))
        return unlike(
            [
                one if one in ("null", "int", "string") else a_record(chance, defined, depth)
                for one in kinds
            ]
        )
    if kind < 0.7:
        return {"type": "array", "items": a_type(chance, defined, depth - 1)}
    return a_record(chance, defined, depth)


def unlike(branches):
    """The branches of a union, each name once."""
    names = [one if isinstance(one, str) else one["name"] for one in branches]
    return [one for at, one in enumerate(branches) if names[at] not in names[:at]]


def a_record(chance, defined, depth=2):
    """A record that is new, or the name of one that is defined further up."""
    name = chance.choice(NAMES)
    if name in defined:
        return name
    defined.add(name)
    fields = [{"name": one, "type": a_type(chance, defined, depth - 1)} for one in "xy"]
    return {"type": "record", "name": name, "fields": fields}


def other_avro(chance, schema):
    """A schema with other types, defaults, names and orders of branches somewhere."""
    if isinstance(schema, list):
        branches = [other_avro(chance, one) for one in schema]
        return chance.sample(branches, len(branches)) if is_tidy(branches) else branches
    if isinstance(schema, str):
        return "long" if schema == "int" and chance.random() < 0.2 else schema
    if schema["type"] == "array":
        return {**schema, "items": other_avro(chance, schema["items"])}
    fields = [{**one, "type": other_avro(chance, one["type"])} for one in schema["fields"]]
    more = {}
    if chance.random() < 0.2:
        more["aliases"] = [chance.choice(NAMES)]
    if chance.random() < 0.15:
        fields.append({"name": "z", "type": "int", **chance.choice(({}, {"default": 1}))})
    return {**schema, "fields": fields, **more}


def is_tidy(branches):
    """Whether no record is defined in a union, so that its branches may change places."""
    return all(isinstance(one, str) for one in branches)


def a_datum(chance, schema, named, depth=4):
    if isinstance(schema, list):
        branch = chance.choice(schema)
        if depth <= 0 and "null" in schema:
            branch = "null"
        value = a_datum(chance, branch, named, depth - 1)
        is_record = not isinstance(branch, str) or branch in named
        return (
            (branch if isinstance(branch, str) else branch["name"], value) if is_record else value
        )
    schema = named.get(schema, schema) if isinstance(schema, str) else schema
    if isinstance(schema, str):
        return {"null": None, "int": 7, "long": 8, "string": "s"}[schema]
    if schema["type"] == "array":
        count = chance.randint(0, 2) if depth > 0 else 0
        return [a_datum(chance, schema["items"], named, depth - 1) for _ in range(count)]
    if depth < -4:
        raise RecursionError
    return {
        field["name"]: a_datum(chance, field["type"], named, depth - 1)
        for field in schema["fields"]
    }


def test_avro_that_is_said_to_be_read_is_read_by_fastavro():
    verdicts = {True: 0, False: 0}
    for seed in SEEDS:
        chance = random.Random(seed)
        written = a_record(chance, set())
        read = other_avro(chance, written)
        writer, reader = (read_avro(json.dumps(one).encode()) for one in (written, read))
        problems = reader.cannot_read(writer)
        failed = None
        for _ in range(20):
            data = io.BytesIO()
            try:
                datum = a_datum(chance, writer.schema, writer.named)
            except RecursionError:
                break
            parsed = [fastavro.parse_schema(one) for one in (written, read)]
            fastavro.schemaless_writer(data, parsed[0], datum)
            data.seek(0)
            try:
                fastavro.schemaless_reader(data, *parsed)
            except fastavro.read.SchemaResolutionError as error:
                failed = error
                break
        assert problems or failed is None, f"seed {seed}: {failed}\n{written}\n{read}"
        verdicts[failed is None] += 1
    assert min(verdicts.values()) > len(SEEDS) / 20, verdicts
