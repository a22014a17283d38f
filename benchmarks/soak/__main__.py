"""Run a router under load while faults are injected into its workers.

    python -m benchmarks.soak --minutes 30 --seed 1 --kill-router 120

The router and the clients are separate processes; this process runs fake workers. Options:

- `--kill-router 120`: kill and restart the router every 120 seconds.
- `--processes 2 --kill-member 60`: kill one every 60 s in the first half; the second shows growth.
- `--stall-member 60`: stop one router process for some seconds every 60 seconds.
- `--tenants`: send the requests of two tenants.
- `--guarded`: use TLS to clients and one worker, refuse some requests for their wait, and run
  batches of a third tenant on a disk that fills up.
- `--seed`: choose the faults.

Compiled modules are used if there are any; VLLM_SCHED_COMPILED=0 selects the plain ones. Each
minute prints the outcomes of requests, the router's load, its memory and its open files. The exit
status is 1 if a request hung or had a wrong answer, a batch line had no or two results, something
stayed in flight, or memory or open files grew.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.soak.clients import run_clients
from benchmarks.soak.router import Router
from benchmarks.soak.run import SoakRun
from proxy.compiled import locate
from tests.faults import disk, dns
from tests.faults.faulty_fleet import FaultyFleet
from tests.proxy.certificates import Authority
from vllm_sched.workers.launch import free_port


async def soak(args: argparse.Namespace) -> int:
    """Run router, clients and faults, print the table and return the exit status."""
    # Workers with TLS may write to a router that disconnected in the same loop iteration.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        batch_disk = disk.ProcessDisk(Path(folder)) if args.guarded else None
        env, lookup_fault = dns.failing_lookups(Path(folder), batch_disk.code if batch_disk else "")
        authority = Authority(Path(folder) / "certificates") if args.guarded else None
        tls = authority.client() if authority else None
        workers = FaultyFleet(args.seed, lookup_fault, authority)
        workers.disk = batch_disk
        await workers.start()
        port, admin = free_port(), free_port()
        fleet = Path(folder) / "fleet.yaml"
        batches = Path(folder) / "batches" if args.guarded else None
        fleet.write_text(
            workers.fleet(
                listen=port,
                admin=admin,
                processes=args.processes,
                tenants=args.tenants,
                batches=batches,
            )
        )
        router = Router(fleet, port, env, tls)
        await router.start()
        modules = "compiled" if locate.in_use() else "plain"
        print(f"seed {args.seed}, {args.processes} processes, {modules} modules")
        clients = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.soak", "--clients-of", str(port),
            "--clients", str(args.clients), "--seed", str(args.seed),
            "--minutes", str(args.minutes), *(["--tenants"] if args.tenants else []),
            *(["--ca", str(authority.ca_file)] if authority else []),
            stdout=asyncio.subprocess.PIPE, limit=1 << 22,
        )  # fmt: skip
        try:
            return await SoakRun(args, workers, router, clients).run()
        finally:
            for process in (clients, router.process):
                if process is not None and process.returncode is None:
                    process.kill()
                    await process.wait()
            await workers.stop()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the soak, or the clients with --clients-of."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    options.add_argument("--minutes", type=float, default=30.0)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--clients", type=int, default=24)
    options.add_argument("--kill-router", type=float, default=0.0, help="interval in seconds")
    options.add_argument("--processes", type=int, default=1)
    options.add_argument("--tenants", action="store_true")
    options.add_argument("--kill-member", type=float, default=0.0, help="interval in seconds")
    options.add_argument("--stall-member", type=float, default=0.0, help="interval in seconds")
    options.add_argument("--guarded", action="store_true", help="implies --tenants")
    options.add_argument("--clients-of", type=int, help=argparse.SUPPRESS)
    options.add_argument("--ca", help=argparse.SUPPRESS)
    args = options.parse_args(argv)
    if args.kill_member and 2 * args.kill_member >= 60 * args.minutes:
        options.error("--kill-member: no process would be killed in the first half of --minutes")
    args.tenants |= args.guarded
    if args.clients_of:
        asyncio.run(run_clients(args))
        return 0
    return asyncio.run(soak(args))


if __name__ == "__main__":
    raise SystemExit(main())
