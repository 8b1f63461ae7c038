"""An application with one of each: a front end, an engine on GPUs, one over hosts, a taker."""

from __future__ import annotations

from dynbus.actors.declaring.resources import Resources
from dynbus.actors.deploying.application import Application, Hosts, Queue, Scale, Workload

FRONT = Workload(
    name="front", address="chat.Front", key="Front", replicas=2, port=8000, listen="0.0.0.0"
)
ENGINE = Workload(
    name="engine",
    address="chat.Engine",
    key="Engine",
    replicas=4,
    resources=Resources(cpu=3.5, memory=8 * 1024**3, gpu=2),
    scale=Scale(1, 8, 16),
    reaches_peers=True,
)
LARGE = Workload(
    name="large",
    address="chat.Large",
    key="Large",
    replicas=1,
    resources=Resources(gpu=8),
    hosts=Hosts(2, "ray start --head", "ray start --address=$LWS_LEADER_ADDRESS:6379 --block"),
    reaches_peers=True,
)
PRINTER = Workload(
    name="printer",
    address="chat.Printer",
    key="Printer",
    replicas=1,
    grace=95,
    queues=(Queue("DYNBUS_WORK_chat+Printer+print", ("high", "normal", "low"), 16),),
    is_called=False,
    scale=Scale(0, 4, 8),
)
PLAIN = Application(name="chat", targets=("actors.py",), workloads=(FRONT, PRINTER))
WHOLE = Application(
    name="chat",
    targets=("actors.py",),
    workloads=(FRONT, ENGINE, LARGE, PRINTER),
    options=("--Engine.model=a b",),
    configs={"etc/chat.yaml": "Front: {port: 8000}\nbus: {drain_grace: 30}\n"},
    keys="auth/seeds",
    server_users="authorization { }\n",
    variables=("HF_TOKEN",),
    secret_files={"api-keys": "/etc/chat/api-keys"},
    egress=(443,),
)
ELSEWHERE = Application(
    name="chat",
    targets=("actors.py",),
    workloads=(FRONT, PRINTER),
    servers=("nats://a.example:4222", "tls://b.example:4333"),
)
