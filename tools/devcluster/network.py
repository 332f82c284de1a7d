"""The network of the node: a namespace with one veth pair to the host and no other way out.

What kube-proxy, the CNI bridge and the kubelet do to iptables, routes and sysctls stays inside it
and goes with it. The host gets two routes, so that tests and people reach pods and Services.
"""

from collections.abc import Sequence
from pathlib import Path

from devcluster.settings import Settings
from devcluster.shell import run, succeeds


def plan(settings: Settings) -> list[Sequence[str]]:
    """Return the commands that make the network, in order."""
    inside = ["ip", "-netns", settings.name]
    interface = settings.host_interface
    return [
        ["ip", "netns", "add", settings.name],
        [
            "ip",
            "link",
            "add",
            interface,
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            settings.name,
        ],
        ["ip", "addr", "add", f"{settings.host_ip}/{settings.link_prefix}", "dev", interface],
        ["ip", "link", "set", interface, "up"],
        [*inside, "link", "set", "lo", "up"],
        [*inside, "addr", "add", f"{settings.node_ip}/{settings.link_prefix}", "dev", "eth0"],
        [*inside, "link", "set", "eth0", "up"],
        # The kubelet and kube-proxy want a default route; the host forwards nothing.
        [*inside, "route", "add", "default", "via", settings.host_ip],
        # CoreDNS listens on this address. Not every kernel has dummy interfaces.
        [*inside, "addr", "add", f"{settings.dns_ip}/32", "dev", "lo"],
        ["nsenter", f"--net={settings.netns_path}", "sysctl", "-qw", "net.ipv4.ip_forward=1"],
        ["ip", "route", "add", settings.pod_cidr, "via", settings.node_ip, "dev", interface],
        ["ip", "route", "add", settings.service_cidr, "via", settings.node_ip, "dev", interface],
    ]


def create(settings: Settings) -> None:
    """Make the network unless it is complete; remove what a broken attempt left first."""
    if succeeds(["ip", "-netns", settings.name, "route", "get", settings.host_ip]) and _routed(
        settings
    ):
        return
    remove(settings)
    for command in plan(settings):
        run(command)


def remove(settings: Settings) -> None:
    """Remove the namespace and the veth pair, with their addresses, routes and firewall rules."""
    if settings.netns_path.exists() and not succeeds(["ip", "netns", "del", settings.name]):
        settings.netns_path.unlink()  # /run outlived the mount: a plain file is left
    succeeds(["ip", "link", "del", settings.host_interface])


def remove_netns_mountpoint(folder: Path = Path("/run/netns")) -> None:
    """Unmount the folder of `ip netns add`, unless others have a namespace there."""
    if not folder.is_dir() or any(folder.iterdir()):
        return
    while succeeds(["umount", folder]):  # such mounts are stacked when several tools made them
        pass
    folder.rmdir()


def _routed(settings: Settings) -> bool:
    return all(
        settings.host_interface in run(["ip", "route", "show", cidr])
        for cidr in (settings.pod_cidr, settings.service_cidr)
    )
