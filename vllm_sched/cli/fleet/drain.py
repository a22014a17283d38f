"""`vllm-sched drain FLEET.yaml WORKER`: send a worker no new requests; move its requests."""

from __future__ import annotations

import argparse
from urllib.parse import quote

from pydantic import TypeAdapter

from proxy.admin.schemas import Drained, WorkerShown
from proxy.config import FleetConfig
from proxy.core.request.continuable import WAITS
from vllm_sched.cli.fleet.fleet import Commands, fleet_command, read
from vllm_sched.cli.fleet.live_router import LiveRouter, call_router

DRAINED = TypeAdapter(Drained)
UNDRAINED = TypeAdapter(WorkerShown)


def describe(commands: Commands) -> None:
    command = fleet_command(commands, "drain", "send a worker of a running router no new requests")
    command.add_argument("worker", metavar="WORKER", help="the worker's name")
    what = command.add_mutually_exclusive_group()
    what.add_argument(
        "--now",
        action="store_true",
        help="move requests and running streams to other workers; without it they finish here",
    )
    what.add_argument("--undo", action="store_true", help="send the worker requests again")
    command.add_argument(
        "--url", default="", help="the router's admin API (default: from the fleet file)"
    )
    command.set_defaults(func=lambda args: drain(args, read(args.fleet)))


def drain(arguments: argparse.Namespace, config: FleetConfig) -> int:
    live = LiveRouter.from_config(config, arguments.fleet, arguments.url)
    path = f"workers/{quote(arguments.worker, safe='')}"
    if arguments.undo:
        shown = call_router(live, f"{path}/undrain", UNDRAINED, "{}")
        print(f"{shown.name}: {shown.state}")
        return 0
    query = "?now=true" if arguments.now else ""
    moved = 0
    while True:
        drained = call_router(live, f"{path}/drain{query}", DRAINED, "{}")
        moved += drained.moved
        if WAITS not in drained.remaining:
            break
    text = f"{drained.name}: {drained.state}, {drained.requests} requests"
    if arguments.now:
        text += f", {moved} moved"
    print(text)
    for why, count in sorted(drained.remaining.items()):
        print(f"  {count} remain: {why}")
    return 0
