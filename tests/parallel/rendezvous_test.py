"""The meeting of processes before JAX connects them, with threads in place of processes."""

import concurrent.futures
import os
import re
import socket
import threading

import pytest
from helpers.processes import free_port

from difftx.parallel import rendezvous

STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[07-09],other",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}


def arrivals(*calls):
    """Let processes come one after another, and return what each got: its places, or the text of its error."""

    def come(call):
        try:
            return rendezvous.meet(*call)
        except ValueError as error:
            return str(error)

    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        futures = []
        for call in calls:
            futures.append(pool.submit(come, call))
            threading.Event().wait(0.15)
        return [future.result() for future in futures]


def test_processes_meet_in_any_order_and_a_stranger_is_ignored():
    address = f"localhost:{free_port()}"
    last = [(address, 4, index, 20) for index in (2, 0, 3)]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        rest = pool.submit(arrivals, *last)
        threading.Event().wait(0.4)
        with socket.create_connection(("localhost", int(address.partition(":")[2]))) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            answers = [*arrivals((address, 4, 1, 20)), *rest.result()]
    assert all(answer == answers[0] for answer in answers)
    assert answers[0] == [f"{socket.gethostname()}, GPUs {os.environ.get('CUDA_VISIBLE_DEVICES')}"] * 4


@pytest.mark.parametrize(
    ("calls", "messages"),
    [
        # The second process 1 may be a new start of the first one.
        ([(2, 0), (3, 1), (2, 1)], [None, "it has --processes=3, but process 0 has 2", None]),
        ([(3, 0), (3, 1), (3, 1), (3, 2)], [None, "another process has come with the same --process", None, None]),
        ([(3, 0), (3, 2)], ["process 1 of 3 did not come in time"] * 2),
        ([(2, 1)], ["process 1: waited 1 s .* process 0 does not answer there"]),
        ([(2, 2)], ["indices from 0 to 1"]),
    ],
)
def test_processes_that_do_not_belong_together_are_told(calls, messages):
    address = f"localhost:{free_port()}"
    answers = arrivals(*((address, *call, 1) for call in calls))
    for answer, message in zip(answers, messages, strict=True):
        assert isinstance(answer, list) if message is None else re.search(message, answer), answers


def test_a_process_at_the_address_of_another_server_is_told():
    """Something else listens at the address, as the coordinator of a running job does."""
    with socket.create_server(("localhost", 0)) as server:

        def serve():
            while True:
                peer, _ = server.accept()
                with peer:
                    peer.sendall(b"\x00\x00\x18\x04")  # The first frame of gRPC.

        threading.Thread(target=serve, daemon=True).start()
        address = f"localhost:{server.getsockname()[1]}"
        assert "another job runs there" in arrivals((address, 2, 1, 1))[0]


def test_steps_of_one_job_and_jobs_on_one_node_have_different_ports(monkeypatch):
    """JAX would give all steps of a job one port (marin#5470)."""
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)

    def address(job, step):
        monkeypatch.setenv("SLURM_JOB_ID", str(job))
        monkeypatch.setenv("SLURM_STEP_ID", str(step))
        host, port = rendezvous.place_in_job(1)[0].split(":")
        assert (host, 61440 <= int(port) <= 65535) == ("node07", True)
        return port

    assert rendezvous.place_in_job(1)[1:] == (4, 3)
    assert len({address(job, step) for job in range(4711, 4721) for step in range(50)}) == 500
    assert address(4711, 3) == address(4711, 3)  # All tasks of a step compute the same port.
    monkeypatch.setenv("JAX_COORDINATOR_PORT", "1234")
    assert rendezvous.place_in_job(1)[0] == "node07:1234"
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "host:5")
    assert rendezvous.place_in_job(1) == ("host:5", 4, 3)


ALL = ("node a, GPUs 0,1,2,3,4,5,6,7", "node b, GPUs 0,1,2,3,4,5,6,7")


@pytest.mark.parametrize(
    ("places", "environment", "expected"),
    [
        (ALL, {}, [None, None]),  # One task per node.
        (ALL[:1] * 8, {}, [[gpu] for gpu in range(8)]),
        (ALL[:1] * 2 + ALL[1:] * 2, {}, [[0, 1, 2, 3], [4, 5, 6, 7]] * 2),
        (("node a, GPUs 0", "node a, GPUs 1"), {"CUDA_VISIBLE_DEVICES": "0"}, [None, None]),
        # Slurm numbers the GPUs of each task from 0 if it binds tasks to GPUs.
        (("node a, GPUs 0",) * 8, {"CUDA_VISIBLE_DEVICES": "0", "SLURM_GPUS_ON_NODE": "8"}, [None] * 8),
        (("node a, GPUs 0,1",) * 2, {"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_ON_NODE": "4"}, [None] * 2),
        (("node a, GPUs None",) * 2, {"CUDA_VISIBLE_DEVICES": "", "SLURM_GPUS_ON_NODE": "4"}, [[0, 1], [2, 3]]),
        (ALL[:1] * 3, {}, "3 processes of a node cannot share 8 GPUs equally"),
    ],
)
def test_the_processes_of_a_node_share_all_of_its_gpus(monkeypatch, places, environment, expected):
    monkeypatch.delenv("SLURM_GPUS_ON_NODE", raising=False)
    for name, value in ({"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"} | environment).items():
        monkeypatch.setenv(name, value)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            rendezvous.local_gpus(list(places), 0)
    else:
        assert [rendezvous.local_gpus(list(places), index) for index in range(len(places))] == expected
