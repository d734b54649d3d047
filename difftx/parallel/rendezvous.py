"""The meeting of the processes of a job at the coordinator's address, before JAX's coordinator starts there.

JAX's coordinator aborts all processes of a running job when another process comes with one of their indices, for
example because its script was copied. A process that finds JAX at the address is not part of this job.
"""

import contextlib
import glob
import json
import os
import socket
import threading
import time
from typing import Any

from jax._src.clusters import ClusterEnv  # JAX has no public name for the detection of cluster managers.


def place_in_job(timeout: int) -> tuple[str, int, int]:
    """Return the coordinator's address, the number of processes, and this process's index, from the cluster manager.

    Raise `ValueError` if no cluster manager has started this process.
    """
    clusters = ClusterEnv._cluster_types
    cluster = next((env for env in clusters if not env.opt_in_only_method and env.is_env_present()), None)
    if cluster is None:
        how = "write srun before the command" if "SLURM_JOB_ID" in os.environ else "give --coordinator=HOST:PORT"
        raise ValueError(f"neither srun, mpirun, GKE nor a TPU pod has started it; {how}, or omit --distributed")
    port = os.environ.get("JAX_COORDINATOR_PORT")
    if cluster.name == "slurm" and port is None:  # JAX would give all steps of a job one port.
        job, step = (int(os.environ.get(name, 0)) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
        port = str(61440 + (job + 1531 * step) % 4096)
    address = os.environ.get("JAX_COORDINATOR_ADDRESS") or cluster.get_coordinator_address(timeout, port)
    return address, cluster.get_process_count(), cluster.get_process_id()


def meet(address: str, count: int, index: int, timeout: int) -> list[str]:
    """Wait until all processes have come, and return the place of each: its node and the GPUs that it sees.

    Raise `ValueError` if not all come in time, or if two processes have the same index.
    """
    host, _, port = address.rpartition(":")
    if not port.isdigit() or not 0 <= index < count:
        given = f"--coordinator={address} --processes={count} --process={index}"
        raise ValueError(f"{given}: give HOST:PORT, and indices from 0 to {count - 1}")
    deadline, collector = time.monotonic() + timeout, None
    if index == 0:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        bound = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", address).rpartition(":")[2]
        server = socket.create_server(("", int(bound)), family=family, dualstack_ipv6=dual)
        collector = threading.Thread(target=_collect, args=(server, count, deadline), daemon=True)
        collector.start()
    node = os.environ.get("SLURMD_NODENAME", socket.gethostname())
    message = json.dumps([index, count, f"{node}, GPUs {os.environ.get('CUDA_VISIBLE_DEVICES')}"])
    answer = None
    while answer is None:
        why = "process 0 does not answer there; start it, or open the port"
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=10) as peer:
                why = "another job runs there; choose another port"
                peer.settimeout(max(deadline - time.monotonic(), 0) + 5)  # Process 0 answers at its own deadline.
                peer.sendall(message.encode() + b"\n")
                answer = json.loads(peer.makefile("rb").read())
        except (OSError, ValueError):  # Process 0 may start later, or an earlier job may be about to end.
            time.sleep(0.2)
            if time.monotonic() > deadline:
                waited = f"waited {timeout} s (multihost.initialization_timeout_seconds) at {address}"
                answer = f"{waited}: {why}"
    if collector is not None:
        collector.join()
    if isinstance(answer, str):
        raise ValueError(f"process {index}: {answer}")
    return answer


def _collect(server: socket.socket, count: int, deadline: float) -> None:
    """Wait in process 0 for the messages of all processes, and answer each with all places, or with the failure."""
    peers: dict[int, tuple[socket.socket, str]] = {}
    answer: Any = None
    with contextlib.ExitStack() as stack:
        while answer is None:
            server.settimeout(max(deadline - time.monotonic(), 0.01))
            try:
                peer = stack.enter_context(server.accept()[0])
                peer.settimeout(5)
                index, its_count, place = json.loads(peer.makefile("rb").readline(4096))
            except (OSError, ValueError, TypeError):  # No process came in time, or this one is not of difftx.
                if time.monotonic() > deadline:
                    absent = ", ".join(str(index) for index in range(count) if index not in peers)
                    answer = f"process {absent} of {count} did not come in time; start the same command on every host"
                continue
            if its_count != count or index not in range(count):
                _send(peer, f"it has --processes={its_count}, but process 0 has {count}")
                continue
            if index in peers:  # The first one may have ended.
                _send(peers[index][0], "another process has come with the same --process and --coordinator")
            peers[index] = peer, place
            if len(peers) == count:
                answer = [peers[index][1] for index in range(count)]
        server.close()  # Before an answer arrives, because JAX then listens at this port.
        for peer, _ in peers.values():
            _send(peer, answer)


def _send(peer: socket.socket, answer: Any) -> None:
    with contextlib.suppress(OSError), peer:
        peer.sendall(json.dumps(answer).encode())


def local_gpus(places: list[str], index: int) -> list[int] | None:
    """Return the GPUs of a process, as indices into those that it sees, or None for all that it sees.

    The processes of a node share its GPUs equally. JAX itself would give each process of Slurm or Open MPI one GPU.
    """
    visible, granted = os.environ.get("CUDA_VISIBLE_DEVICES"), int(os.environ.get("SLURM_GPUS_ON_NODE", 0))
    count = len(visible.split(",")) if visible else granted or len(glob.glob("/dev/nvidia[0-9]*"))
    processes = places.count(places[index])
    if processes == 1 or count < max(processes, granted):  # The launcher has given each process GPUs of its own.
        return None
    if count % processes:
        raise ValueError(
            f"{processes} processes of a node cannot share {count} GPUs equally; start one per GPU or node"
        )
    first = places[:index].count(places[index]) * (count // processes)
    return list(range(first, first + count // processes))
