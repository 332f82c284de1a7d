"""The authorities of the cluster, its certificates and kubeconfigs, made with openssl."""

import base64
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from devcluster.settings import Settings
from devcluster.shell import run, write_if_changed

_DAYS = "3650"
_DONE = ".complete"
FRONT_PROXY = "front-proxy"
"""Name of the authority by which the apiserver proves to aggregated APIs that it asks for a user.
It needs one of its own: a client with a certificate of it is taken for a proxy."""


@dataclass(frozen=True)
class Certificate:
    """A leaf certificate: file name, X.509 subject, extended key usages, alternative names."""

    name: str
    subject: str
    usages: str = "clientAuth"
    alternative_names: str = ""
    authority: str = "ca"


def certificates(settings: Settings) -> list[Certificate]:
    """Return every leaf certificate of the cluster.

    The subject is the user and group that RBAC and the Node authorizer see.
    """
    apiserver_names = ["kubernetes", "kubernetes.default", "kubernetes.default.svc"]
    apiserver_names += ["kubernetes.default.svc.cluster.local", "localhost"]
    apiserver_ips = ["127.0.0.1", settings.apiserver_service_ip, settings.node_ip]
    node = settings.node_name
    return [
        Certificate(
            "apiserver",
            "/CN=kube-apiserver",
            "serverAuth",
            ",".join(
                [
                    *(f"DNS:{name}" for name in apiserver_names),
                    *(f"IP:{ip}" for ip in apiserver_ips),
                ]
            ),
        ),
        Certificate("apiserver-kubelet", "/O=system:masters/CN=kube-apiserver-kubelet-client"),
        Certificate(
            "kubelet",
            f"/O=system:nodes/CN=system:node:{node}",
            "clientAuth,serverAuth",
            f"DNS:{node},IP:{settings.node_ip},IP:127.0.0.1",
        ),
        Certificate("admin", "/O=system:masters/CN=admin"),
        Certificate("kube-controller-manager", "/CN=system:kube-controller-manager"),
        Certificate("kube-scheduler", "/CN=system:kube-scheduler"),
        Certificate("kube-proxy", "/CN=system:kube-proxy"),
        Certificate("kube-router", "/CN=system:kube-router"),
        Certificate("coredns", "/CN=system:coredns"),
        Certificate("volumes", "/CN=agenticrun:volume-provisioner"),
        Certificate("front-proxy-client", f"/CN={FRONT_PROXY}", authority=FRONT_PROXY),
    ]


def kubeconfig(
    settings: Settings, user: str, authority: bytes, certificate: bytes, key: bytes
) -> str:
    """Return a kubeconfig that includes its certificates, so that it can be copied."""

    def encoded(data: bytes) -> str:
        return base64.b64encode(data).decode()

    return f"""\
apiVersion: v1
kind: Config
clusters:
- name: {settings.name}
  cluster:
    server: https://{settings.node_ip}:{settings.apiserver_port}
    certificate-authority-data: {encoded(authority)}
users:
- name: {user}
  user:
    client-certificate-data: {encoded(certificate)}
    client-key-data: {encoded(key)}
contexts:
- name: {settings.name}
  context: {{cluster: {settings.name}, user: {user}}}
current-context: {settings.name}
"""


def create(settings: Settings) -> None:
    """Make the whole PKI; leave a complete one alone and replace an incomplete one."""
    folder = settings.pki
    if (folder / _DONE).exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    for authority in ("ca", FRONT_PROXY):
        key, subject = folder / f"{authority}.key", f"/CN={settings.name}-{authority}"
        _key(key)
        signed: list[str | Path] = ["-days", _DAYS, "-out", folder / f"{authority}.crt"]
        run(["openssl", "req", "-x509", "-new", "-key", key, "-subj", subject, *signed])
    _key(folder / "service-accounts.key")
    run(
        [
            "openssl",
            "ec",
            "-in",
            folder / "service-accounts.key",
            "-pubout",
            "-out",
            folder / "service-accounts.pub",
        ]
    )
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda certificate: _issue(settings, certificate), certificates(settings)))
    write_if_changed(settings.kubeconfig, (folder / "admin.kubeconfig").read_text(), mode=0o600)
    (folder / _DONE).touch()


def _key(path: Path) -> None:
    run(["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", path])


def _issue(settings: Settings, certificate: Certificate) -> None:
    """Write key, certificate and kubeconfig of one leaf."""
    folder = settings.pki
    key, request, signed = (
        folder / f"{certificate.name}.{suffix}" for suffix in ("key", "csr", "crt")
    )
    extensions = folder / f"{certificate.name}.ext"
    lines = [
        "basicConstraints=critical,CA:FALSE",
        "keyUsage=critical,digitalSignature,keyEncipherment",
    ]
    lines.append(f"extendedKeyUsage={certificate.usages}")
    if certificate.alternative_names:
        lines.append(f"subjectAltName={certificate.alternative_names}")
    extensions.write_text("\n".join(lines) + "\n")
    _key(key)
    run(["openssl", "req", "-new", "-key", key, "-subj", certificate.subject, "-out", request])
    # A random serial each: a shared serial file would be a race between threads.
    serial = "0x" + run(["openssl", "rand", "-hex", "16"]).strip()
    signing = [
        "openssl",
        "x509",
        "-req",
        "-in",
        str(request),
        "-out",
        str(signed),
        "-days",
        _DAYS,
        "-set_serial",
        serial,
    ]
    signer = folder / f"{certificate.authority}.crt"
    run([*signing, "-extfile", extensions, "-CA", signer, "-CAkey", signer.with_suffix(".key")])
    request.unlink()
    extensions.unlink()
    authority = (folder / "ca.crt").read_bytes()
    text = kubeconfig(settings, certificate.name, authority, signed.read_bytes(), key.read_bytes())
    write_if_changed(folder / f"{certificate.name}.kubeconfig", text, mode=0o600)
