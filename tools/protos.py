"""Compiles the `.proto` files of `ister.wire`: `python -m tools.protos [DIRECTORY]`.

services.binpb   the descriptors, from which message classes are made at run time
*_pb2.pyi        the types of the messages, for mypy and editors
services.py      every RPC with the types of its messages
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

from google.protobuf import descriptor_pb2

_SOURCES: Final = Path(__file__).resolve().parent.parent / "src" / "ister" / "wire"
# A message's package, as the namespaces of `ister.wire` are named.
_NAMESPACES: Final = {"ister": "ister_api"}


def main(target: Path = _SOURCES) -> None:
    """Writes all files into a directory."""
    compiled = target / "services.binpb"
    names = ["danube.proto", "danube_schema.proto", "danube_admin.proto", "ister.proto"]
    outputs = [f"--descriptor_set_out={compiled}", f"--pyi_out={target}"]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", "--include_imports"]
    subprocess.run([*command, *outputs, *names], cwd=_SOURCES, check=True)  # noqa: S603
    files = descriptor_pb2.FileDescriptorSet.FromString(compiled.read_bytes()).file
    (target / "services.py").write_text(_services(list(files)))
    for path in target.glob("*_pb2.pyi"):
        # protoc's types are narrower than protobuf: an enum field also takes a number.
        text = re.sub(r"_Union\[([\w.]+), str\]", r"_Union[\1, str, int]", path.read_text())
        # Nobody asks for numbers of fields, nor for slots.
        text = re.sub(r"^    (__slots__ = |\w+_FIELD_NUMBER: ).*\n", "", text, flags=re.MULTILINE)
        path.write_text(text.replace("_Mapping]", "_Mapping[str, object]]"))


def _services(files: list[descriptor_pb2.FileDescriptorProto]) -> str:
    lines = [
        '"""Every RPC, by service, with the types of its messages. Written by `make protos`."""',
        "",
        "from __future__ import annotations",
        "",
        "from ister.wire.protos import Rpc, danube, danube_admin, danube_schema, ister_api",
        "",
        "__all__ = [",
        *sorted(f'    "{service.name}",' for file in files for service in file.service),
        "]",
    ]
    for file in files:
        for service in file.service:
            where = f"{file.package}.{service.name}"
            lines += ["", "", f"class {service.name}:", f'    """{where}."""', ""]
            for method in service.method:
                types = f"{_typed(method.input_type)}, {_typed(method.output_type)}"
                lines.append(f'    {method.name} = Rpc[{types}]("{where}", "{method.name}")')
    return "\n".join([*lines, ""])


def _typed(message: str) -> str:
    """Names a message's class: `.ister.InfoRequest` → `ister_api.InfoRequest`."""
    _, package, name = message.split(".")
    return f"{_NAMESPACES.get(package, package)}.{name}"


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:]))
