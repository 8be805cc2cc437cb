"""What the live page of a gateway needs of the other services: tokenizer, estimator, history of a sample, and audits.

Everything is loaded when a page first uses it. Audits run in a separate process (`live_audit`).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache

import msgspec

from rollmesh.mesh.live_audit import AuditOrder
from rollmesh.mesh.run_layout import RunLayout
from rollmesh.services.gateway.page.parts import LedgerAuditor, LifeLine, PageParts, TokenDecoder
from rollmesh.services.reward.config import shown_name
from rollmesh.services.reward.finalizer_list import call_group_code
from rollmesh.shared.bus.bus import StreamRecord
from rollmesh.shared.domain.ledger_head import LedgerHead
from rollmesh.shared.domain.trajectory import GroupContext
from rollmesh.shared.errors import DeadlineExceeded, InvalidInput, UnknownRun
from rollmesh.shared.process.process_launch import bound_to_parent
from rollmesh.trainer.checkpoint_files import list_checkpoints
from rollmesh.trainer.estimators import Estimator, make_estimator

ANSWER_BYTES_MAX = 16 << 20
_CAUSE_CHARS_MAX = 500


def page_parts(layout: RunLayout, decoder: Callable[[], TokenDecoder | None]) -> PageParts:
    """Return the parts of the page for the run at `layout`. Nothing is loaded or started."""
    config = layout.config
    metrics = layout.run_dir / "metrics.jsonl"
    return PageParts(
        run=layout.run,
        metrics=metrics
        if (layout.run_dir / "addresses.json").exists()
        else None,  # else the node has joined from elsewhere
        decoder=decoder,
        estimator=shown_name(config.learner.estimator.name),
        advantages=_advantages(layout),
        auditor=_auditor(layout),
        history=_history,
    )


def _advantages(layout: RunLayout) -> Callable[[GroupContext], Mapping[str, float]]:
    config = layout.config

    @cache
    def estimator() -> Estimator:
        return make_estimator(config.learner.estimator, config.reward.weights, layout.base_dir)

    def advantages(group: GroupContext) -> Mapping[str, float]:
        return call_group_code("the estimator", estimator().of_group, group)

    return advantages


def _history(records: Sequence[StreamRecord], sample: str) -> list[LifeLine]:
    """Return the history of a sample from consecutive records. Raise InvalidInput for a record that cannot be
    decoded."""
    from rollmesh.services.coordinator.audit_history import sample_history
    from rollmesh.services.coordinator.fact_codec import decode_record
    from rollmesh.services.coordinator.ledger import StoredRecord

    stored = []
    for record in records:
        try:
            one = decode_record(record.payload)
        except (InvalidInput, ValueError) as err:
            raise InvalidInput(f"ledger record {record.seq} cannot be decoded: {err}") from err
        stored.append(
            StoredRecord(position=record.seq, record_id=one.record_id, time_unix_s=one.time_unix_s, facts=one.facts)
        )
    found = sample_history(stored, sample)
    return [LifeLine(position=line.position, time_unix_s=line.time_unix_s, what=line.what) for line in found]


def _auditor(layout: RunLayout) -> LedgerAuditor:
    async def audit(run: str, heads: Sequence[tuple[str, LedgerHead]]) -> bytes:
        login = layout.bus_login()
        checkpoints = layout.run_dir / "checkpoints"
        has_checkpoint = run == layout.run and bool(list_checkpoints(checkpoints))
        order = AuditOrder(
            url=layout.config.bus.url or layout.bus_server().known_url(),
            user=login.user,
            password=login.password,
            tls=() if login.tls is None else tuple(map(str, (login.tls.ca, login.tls.certificate, login.tls.key))),
            run=run,
            heads=tuple((where, str(head)) for where, head in heads),
            checkpoint=str(checkpoints)
            if has_checkpoint
            else "",  # the newest when the process starts; the learner removes older ones
            archive=str(layout.archive or ""),
        )
        return await _run_audit(order, layout.config.gateway.page.audit_s_max)

    return audit


async def _run_audit(order: AuditOrder, limit_s: float) -> bytes:
    """Audit in a separate process, and return the report. Raise DeadlineExceeded or UnknownRun."""
    process = await asyncio.create_subprocess_exec(
        *bound_to_parent([sys.executable, "-m", "rollmesh.mesh.live_audit"]),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=ANSWER_BYTES_MAX,
    )
    try:
        async with asyncio.timeout(limit_s):
            report, errors = await process.communicate(msgspec.json.encode(order))
    except TimeoutError as err:
        raise DeadlineExceeded(
            f"the audit did not finish within {limit_s:.0f} s; raise `gateway.page.audit_s_max`, or call `rollmesh "
            "audit`"
        ) from err
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode != 0:
        raise UnknownRun(
            errors.decode(errors="replace").strip()[-_CAUSE_CHARS_MAX:] or "the audit failed", run=order.run
        )
    return report
