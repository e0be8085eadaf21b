"""Descriptor sets of .proto texts, made by the compiler."""

import tempfile
from importlib import resources
from pathlib import Path

from grpc_tools import protoc


def compile_proto(text: str, **imports: str) -> bytes:
    """The FileDescriptorSet of a text; `imports` are texts of files that it imports, by stem."""
    known = str(resources.files("grpc_tools").joinpath("_proto"))
    with tempfile.TemporaryDirectory() as directory:
        for name, content in {**imports, "schema": text}.items():
            Path(directory, f"{name}.proto").write_text(content)
        out = Path(directory, "schema.pb")
        options = [f"-I{directory}", f"-I{known}", "--include_imports"]
        status = protoc.main(["protoc", *options, f"--descriptor_set_out={out}", "schema.proto"])
        assert status == 0, text
        return out.read_bytes()
