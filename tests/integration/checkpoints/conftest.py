"""A real S3 protocol: moto's server on this machine.

The environment variables that find it are those of pods.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from moto.server import ThreadedMotoServer
from s3fs import S3FileSystem

BUCKET = "checkpoints"


@pytest.fixture(scope="session")
def s3_server() -> Iterator[dict[str, str]]:
    """A server with one bucket; the environment that clients need."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    environment = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        S3FileSystem.clear_instance_cache()
        S3FileSystem().mkdir(BUCKET)
        yield environment
    S3FileSystem.clear_instance_cache()
    server.stop()


@pytest.fixture
def s3(s3_server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The bucket's URI, for clients in this process."""
    for name, value in s3_server.items():
        monkeypatch.setenv(name, value)
    S3FileSystem.clear_instance_cache()
    return f"s3://{BUCKET}"
