"""The numbers, lists and names that the documentation quotes from the code are those of the code.

`docs/security.md` and `docs/wire.md` have tests of their own (`tests/security/test_claims.py`,
`tests/unit/wire/test_documented.py`). Measured figures and examples are not held.
"""

from __future__ import annotations

import ast
import math
import re
import tomllib
from pathlib import Path

import pytest
from tests.sim.test_membership import MUTANTS
from tests.unit.plan.cases import SIZES
from tools.call_frames import MOST_FRAMES

from covey.agent import environments, jobs, launching, snapshot
from covey.base import arithmetic, numbers, settings
from covey.base.config import KNOWN_VARIABLES, GroupConfig
from covey.base.setting_kinds import show_bytes
from covey.cli import main, run
from covey.cli.doctor import command as doctor
from covey.compress import choice, policy, quantisers
from covey.coordinator import run as coordinator
from covey.coordinator import session
from covey.lab.bench import compress as bench_compress
from covey.lab.bench import ddp, sweep
from covey.lab.bench.network import pairs, report, terms
from covey.lab.bench.network import session as network_session
from covey.lab.call_stress import CallStress
from covey.lab.chaos import faults
from covey.net.discovery import responder
from covey.net.host import runs, saved_figures, tcp
from covey.net.keys import clusters
from covey.net.lanes import lane
from covey.net.quic import line
from covey.plan import choose, cost, fit, measurement, network, order, trees
from covey.proto import call_inquiries, evidence, health, message_link, overlay, relay_trips, views
from covey.proto import store as store_rules
from covey.proto.calling import incoming, outgoing
from covey.proto.formation import proposals
from covey.proto.membership import ballots, leader, need
from covey.runtime import checks, environment, events, http_server, progress_bar, recorder, shutdown
from covey.runtime.calls import functions, handlers, lane_transport, serving
from covey.runtime.calls import work as call_work
from covey.runtime.collectives import call_log, failure, native_executor, planner, size_class, trouble
from covey.runtime.compressed import automatic
from covey.runtime.group.strategy import Strategy
from covey.runtime.joining import generations
from covey.runtime.joining import node as member_node
from covey.runtime.keeper import keeper, local_keeper, output, supervisor
from covey.runtime.lanes import connections, rings
from covey.runtime.lanes import kinds as lane_kinds
from covey.runtime.lanes.tuning import path_monitor, rate_limits, stripes, trials
from covey.runtime.links import sockets
from covey.runtime.messages import driving_thread, lane_poll, shared_driving
from covey.runtime.metrics import flight, samples, spans
from covey.runtime.peers import dialer, node_links, resting_links, rules, search
from covey.runtime.peers.remote_process import PeerState
from covey.runtime.relaying import server
from covey.runtime.views import losses, process_table
from covey.wire import (
    checkpoint,
    decoding,
    door,
    formation,
    header,
    manifest,
    membership,
    port_mapping,
    reports,
    seal,
    secret,
    store,
    upnp,
)
from covey.wire import reports as measured
from covey.wire import saved_figures as figures

ROOT = Path(__file__).parents[3]
SRC = ROOT / "src" / "covey"
PYTHON = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=")
SET, SILENCES = GroupConfig(), evidence.DEFAULT_SILENCES
LANES = settings.LANES[1:]
STATES = [state.value for state in PeerState if state not in (PeerState.EXPECTED, PeerState.RELEASED)]
NUMBERS: dict[float, str] = {0.1: "a tenth", 0.2: "a fifth", 0.5: "half", 20: "twenty", 1000: "thousand"}
NUMBERS |= enumerate(("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"))


def spelled(number: float) -> str:
    """Return a number as a word, if a page may have one for it: "ten", "a tenth"."""
    return NUMBERS.get(round(number, 6), f"{number:g}")


def nth(number: int) -> str:
    return {2: "second", 3: "third"}.get(number, f"{number}th")


def times(number: float) -> str:
    return {1.0: "once", 2.0: "twice"}.get(number, f"{spelled(number)} times")


def every(seconds: float) -> str:
    return {1.0: "second", 60.0: "minute"}.get(seconds, f"{seconds:g} s")


def percent(share: float) -> str:
    return f"{round(100 * share, 6):g} %"


def ms(seconds: float) -> str:
    return f"{round(1000 * seconds, 6):g} ms"


def size(nbytes: int) -> str:
    """Return a number of bytes in the largest binary unit: "256 KiB"."""
    return re.sub(r"(\d)([A-Z])", r"\1 \2", show_bytes(nbytes))


def names(known: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in known)


def in_source(file: str, name: str) -> int:
    """Return a number that cannot be imported here: it is in C, or its module imports torch, which takes seconds."""
    found = re.search(rf"\b{name}\b[^=]*= ([\d <*]*\d)", (SRC / file).read_text())
    assert found, f"{file} has no {name}"
    return int(eval(found[1]))


def words(page: str) -> str:
    """Return the text of a page, with a space for each stretch of white space."""
    return " ".join((ROOT / page).read_text().split())


HELD = {
    "README.md": (f"need only Python {PYTHON} or newer",),
    "CONTRIBUTING.md": (
        f"{CallStress.calls:,} calls at once between {spelled(CallStress.nodes)} nodes",
        f"prove it with `plan/check.py` for {SIZES[0]} to {SIZES[-1]} ranks",
        f"{spelled(words('docs/design.md').count('## Walk: '))} walks: an all_reduce",
    ),
    "docs/design.md": (
        f"{spelled(words('docs/design.md').count('## Walk: '))} walks through them",
        f"under the messenger's lock | after {driving_thread.IDLE_DRIVER_SECONDS:g} idle seconds",
        f"functions that other nodes call, up to {SET.call_handlers} at a time",
        f"what the program likes | after {handlers.IDLE_HANDLER_SECONDS:g} idle seconds",
        f"answers up to {http_server.CONNECTIONS} of them at a time",
        f"lets it wait while {outgoing.CALLS_LIMIT} calls to that node are open",
        f"Rings are {size(SET.ring_bytes)} per direction until a process has "
        f"{size(lane_kinds.LARGE_RINGS_TOTAL_BYTES)} of them, then {size(rings.SMALL_RING_BYTES)}",
        f"must take turns every {size(SET.ring_bytes)}",
        f"A ring of {size(SET.ring_bytes)} stays in the second-level cache",
        f"reduce in segments of {size(SET.cached_segment_bytes)} through shared memory",
        f"Two ranks, and sockets, use {size(SET.segment_bytes)}",
        f"sealed and opened in chunks of {size(in_source('native/sealed.c', 'CHUNK_BYTES'))}",
        f"look again ({lane.SPIN_NS // 1000} us, with a core for each rank), yield ({lane.YIELD_NS // 1000} us), sleep",
        f"of up to {size(native_executor.SHORT_BYTES)}, is a single call of the extension",
        f"It looks for {in_source('native/runner.c', 'LOOK_NS') // 1000} us with the GIL held",
        f"the last {recorder.RECORDS} operations in a ring",
        f"spans are made from the ring {times(1 / spans.EVERY_SECONDS)} a second",
        f"Pieces of {size(fit.TREE_PIECE_BYTES)} along trees",
        f"grows evenly from {fit.FOLLOWED_PIECES} pieces an owner on. For more than {fit.MOST_FOLLOWED} ranks the sums",
        f"within a factor of {network.LIKE:g} they are one speed",
        f"seen to be {spelled(network.APART)} times as fast with others",
        f"it is considered for up to {trees.MOST_IN_STAR} ranks",
        f"the exact order of {order.MOST_EXACT} ranks",
        f"Up to {size(SET.exchange_bytes)}, two ranks swap whole buffers and more ranks double recursively",
        f"{spelled(len(measurement.SHARES)).capitalize()} passes, the second with the sizes",
        f"until it takes {percent(planner.COST)}",
        f"it takes at most {spelled(planner.PATIENCE)} of the time that is left to it",
        f"after the {nth(planner.MEASURING)} large sum of an attempt",
        f"the shortest time of {size_class.DRIFT_CALLS} calls",
        f"changed by a factor of {spelled(size_class.CHANGE)}, the ranks measure",
        f"tells all members {times(1 / leader.PULSE_EVERY)} a second that it leads",
        f"A run has up to {numbers.MAX_MEMBERS:,} members",
        f"a rule of its own from {proposals.TELL_ALL + 1} members on",
        f"A control message may have {size(decoding.CONTROL_LIMIT)}",
        f"told to commands for up to {measured.NETWORK_LIMIT} ranks",
        f"leaves waits up to a {every(member_node.GOODBYE_SECONDS)} for links",
        f"waits up to {failure.CAUSE_SECONDS:g} s for that reason",
        f"for {spelled(call_inquiries.TESTIMONY_PATIENCE)} seconds at most, for ranks that are alive",
        f"them to call its last operation, and {spelled(call_inquiries.PARTING_PATIENCE)} seconds at most",
        f"A challenge of {door.CHALLENGE_BYTES} bytes",
        f"looks every {spelled(server.SWEEP_SECONDS)} seconds whether a side",
        f"The shortest of the last {spelled(relay_trips.SAMPLES)} counts",
        f"datagrams of 2 to {port_mapping._PCP_HEAD.size + port_mapping._PCP_MAP.size} bytes",
        f"one deadline and {size(upnp.MOST_DOCUMENT_BYTES)}",
        f"each node sends a new one every {every(responder.RENEW_SECONDS)}",
        f"read the cluster's file every {every(rules.WATCH_SECONDS)}",
        f"the control loop looks {times(1 / rate_limits.SENDING_DIVIDE_SECONDS)} a second",
        f"the peers that send to it, {times(1 / rate_limits.RECEIVING_DIVIDE_SECONDS)} a second",
        f"if it has changed by {spelled(rate_limits.WORTH_TELLING)}",
        f"{percent(rate_limits.PAYLOAD_SHARE)} is what is divided",
        f"asks the kernel {times(1 / connections.LOSS_SAMPLE_EVERY)} a second how many packets",
        f"those that lose {percent(connections.LOSSY)} or more",
        f"tried with up to {size(path_monitor.TRIAL_BYTES)}, and",
        f"{seal.STRIPE_NUMBER.size} bytes tell the receiver its place",
        f"or has timed out {times(tcp.SUSPECT_TIMEOUTS)}; the receiver",
        f"carried the whole transfer, or {size(in_source('native/striped.c', 'AHEAD_BYTES'))} of it",
        f"{size(path_monitor.TRIAL_BYTES)} reaches {spelled(stripes.LEAST_NETWORK_SHARE)} of what the lane does. After "
        f"{size(stripes.JUDGED_BYTES)} the striped lane must do {spelled(trials.CLEAR_GAIN - 1)} more",
        f"{spelled(trials.LOOKS).capitalize()} speeds against all before",
        f"Each of {spelled(trials.LOOKS)} speeds must be {spelled(trials.CLEAR_GAIN - 1)} above the best "
        "of the "
        f"last {spelled(trials.REMEMBERED)}",
        f"With records of {size(seal.SEALED_RECORD_LIMIT)}, all streams but one waited",
        f"With records of {size(seal.SPREAD_RECORD_LIMIT)} they moved",
        f"Lanes with one or {spelled(seal.FEW_STREAMS)} streams",
        f"does not need {settings.STREAMS_LIMIT} descriptors",
        f"link for {spelled(node_links.RETIRE_SECONDS)} more seconds",
        f"lost after {SILENCES.host_silence:g} s (`Silences`",
        f"is lost after {SILENCES.process_silence:g} s, or after {evidence.VOUCHED + SILENCES.process_silence:g} s",
        f"Rank 0 listens {spelled(environment.PORT_OFFSET)} port above MASTER_PORT",
        f"checked by comparing {header.TRANSFER_HEADER_BYTES} bytes",
        f"below 2^-{8 * manifest.STATE_TAG_BYTES + 1 - (manifest.STATE_CHUNK_BYTES // 16).bit_length()}",
        f"an ACK for every {size(message_link.ACK_BATCH)}",
        f"A message above {size(SET.eager_bytes)} can be handed over",
        f"in steps of {size(in_source('native/long_messages.c', 'STEP_BYTES'))}",
        f"only after {line.DEAD_PATH_SECONDS:g} seconds, or after {line.MOVED_SECONDS:g} if the other machine",
        f"it looks every {ms(shared_driving.LINGER_SECONDS)} whether messages are unattended",
        f"at most {MOST_FRAMES['unix']} Python frames on each node, and {MOST_FRAMES['secure']} if its lane",
        f"polls for {ms(lane_poll.SPIN_SECONDS)} before it sleeps",
        f"takes {spelled(search.REGISTRY_SECONDS)} of a second; mDNS",
        f"reports it to all ranks every {spelled(evidence.REPORT_EVERY)} second",
        f"A view excludes a member after {spelled(need.RELINK)} second without a link",
        f"its last {in_source('torch/backend/work.py', 'LENT_WORKS'):,} works of up to "
        f"{in_source('torch/backend/work.py', 'LENT_ELEMENTS')} elements each",
    ),
    "docs/glossary.md": (
        f"The default is {SET.patience:g} s.",
        f"The {formation.LINEAGE_BYTES}-byte name of one run",
        f"its last {recorder.RECORDS} operations in a ring",
        f"a run of more than {overlay.FULL_UP_TO} nodes rest",
        f"after a header of {header.TRANSFER_HEADER_BYTES} bytes",
    ),
    "docs/concepts/health.md": (
        f"after {spelled(SILENCES.heartbeat)} a second of silence ({spelled(evidence.ASK_VOUCHED)} seconds",
        f"stopped, seen by its keeper | at once | {evidence.STOPPED_SILENCE:g} s",
        f"stopped, without a keeper | {SILENCES.suspect_least:g} to {SILENCES.suspect_most:g} s | "
        f"{SILENCES.process_silence:g} s",
        f"lost power | {SILENCES.suspect_least:g} to {SILENCES.suspect_most:g} s | {SILENCES.host_silence:g} s",
        f"with a keeper | after {spelled(evidence.VOUCHED / 60)} minutes | "
        f"{evidence.VOUCHED + SILENCES.process_silence:g} s",
        f"interpreter lock, without a keeper | {SILENCES.suspect_least:g} to {SILENCES.suspect_most:g} s | "
        f"{SILENCES.process_silence:g} s",
        f"suspect after {SILENCES.suspect_least:g} s plus the usual round trip and four times its deviation, at most "
        f"after {SILENCES.suspect_most:g} s. After a wrong suspicion the limit stays at {SILENCES.suspect_most:g} s",
        f"looks every {process_table.PROCESSES_EVERY:g} s, and every {ms(process_table.LOOK_CLOSELY_EVERY)} while",
        f"The peer has {spelled(need.RELINK)} second to be linked again",
        f"nothing follows from it for {spelled(losses.UNLINKED_SECONDS)} seconds",
        f"can be opened, ends after {SILENCES.process_silence + losses.UNLINKED_SECONDS:g} s",
        f"{spelled(tcp.STUCK_TIMEOUTS)} retransmissions in a row failed, and nothing was acknowledged for "
        f"{spelled(tcp.STUCK_SENDER_SECONDS)} seconds",
        f"packets of {sockets.PACKET_LIMITS[0]} bytes, and then of {sockets.PACKET_LIMITS[1]}. Links send packets of "
        f"{sockets.LINK_PACKET_BYTES} bytes at most",
        f"after {spelled(health.SLEPT)} seconds or more it restarts all its timers",
    ),
    "docs/concepts/lanes-and-plans.md": (
        f"The tests prove every plan for {SIZES[0]} to {SIZES[-1]} ranks",
        f"swap whole buffers | up to {size(SET.exchange_bytes)}",
        f"any number of ranks | up to {size(SET.doubling_bytes)}, more than 2 ranks",
        f"all_reduce of more than {size(SET.exchange_bytes)} between 2 ranks, or if all ranks share memory and are at "
        f"most {choose.DIRECT_RANKS}; all_gather if up to {choose.DIRECT_RANKS} ranks",
        f"between more than {choose.DIRECT_RANKS} ranks; broadcast and reduce of more than {size(SET.tree_bytes)}",
        f"broadcast and reduce up to {size(SET.tree_bytes)}",
        f"exact up to {order.MOST_EXACT} ranks",
        f"several slow ranks, up to {trees.MOST_IN_STAR} in all",
        f"and {size(cost.LANE_BUFFER_BYTES)} of buffers at each end",
        f"at least {percent(fit.LEAST_RATIO - 1)}, and {ms(fit.LEAST_SAVED_SECONDS)}, faster than",
        f"at most {percent(fit.RING_SLACK - 1)} slower",
        f"authenticated with AES-{8 * seal.SEAL_KEY_BYTES}-GCM",
        f"directly from the ring, at most {size(in_source('native/ring.c', 'PIECE_BYTES'))} at a time",
        f"begins with a header of {header.TRANSFER_HEADER_BYTES} bytes",
        f"a rank that has waited for {trouble.ANNOUNCE_SECONDS:g} s asks",
    ),
    "docs/concepts/membership.md": (
        f"lineage | {formation.LINEAGE_BYTES} bytes that name one run",
        f"waits {spelled(need.RELINK)} second for a member without a link, or {spelled(ballots.RELINK_VOUCHED)}",
        f"its lease of {leader.LEASE:g} s",
        f"waits {spelled(need.FINISH_TOGETHER)} a second for the others to end",
        f"up to {formation.MAX_OPEN} lineages that may not have ended, with the names of their members; the latest "
        f"{formation.MAX_ENDED} that have ended, and the latest {formation.MAX_GIVEN_UP} that a person abandoned",
        f"{spelled(len(MUTANTS))} mutants, each with one rule removed",
    ),
    "docs/guides/calls.md": (
        f"for {spelled(lane_transport.ANSWERS_SECONDS / 60)} a minute at most",
        f"takes less than {ms(functions.SHORT_SECONDS)} on average",
        f"once takes more than {ms(shared_driving.LINGER_SECONDS)}",
        f"Up to {SET.call_handlers} run at a time",
        f"at most {SET.call_handlers} such functions run on",
        f"refused after {incoming.ANSWERED_CALLS_SECONDS:g} s",
        f"up to {serving.ASIDE_THREADS} of them",
        f"A call carries up to {size(SET.call_bytes)} in each direction",
        f"Streams run up to {call_work.STREAM_CREDIT} items ahead",
    ),
    "docs/guides/chaos.md": (
        f"shorter than {spelled(evidence.STOPPED_SILENCE)} a second",
        f"continued every {faults.SLOW_PULSE[0] * 1000:g} to {ms(faults.SLOW_PULSE[1])}",
    ),
    "docs/guides/collectives.md": (
        f"# in place; op: {' '.join(arithmetic.OPS)}",
        f"A message of up to {size(SET.eager_bytes)} is sent at once; when {size(SET.credit_bytes)} of such messages",
        f"waits for more than {SET.warn_after:g} s logs a warning",
        f"a rank with such a call among its last {call_log.LOGGED} first waits",
        f"up to {spelled(call_inquiries.PARTING_PATIENCE)} seconds. A call that the others never made",
    ),
    "docs/guides/command-line.md": (
        f"| {main.FAULT_CODE} | a fault in covey",
        f"within the timeout of {environment.CLUSTER_JOIN_SECONDS:g} s",
    ),
    "docs/guides/compression.md": (
        f"in `sync_gradients`, arrays of less than {size(policy.SMALLEST_BYTES)} are sent as they are",
        f"have a scale for each block of {quantisers.BLOCK} elements",
        f"for arrays of less than {size(policy.SMALLEST_BYTES)}, it chooses none",
        f"{spelled(planner.TIMED_PLAIN_CALLS)} calls are sent as they are and timed",
        f"within the first {spelled(automatic.REVIEWS[-1])} calls",
        f"repeated after {automatic.REVIEW} calls",
        f"The default, {choice.Auto.max_error:g}, allows",
    ),
    "docs/guides/coordinator.md": (
        f"accepted {spelled(coordinator.RECONNECT_SECONDS)} seconds later at the latest",
        f"growing pauses of up to {spelled(session.REGISTRATION_PAUSES.most)} seconds",
        f"not heard for {spelled(coordinator.WORKER_SILENCE / 60)} a minute",
    ),
    "docs/guides/elastic.md": (
        f"stops the other ranks after a {every(keeper.RANK_FAILURE_GRACE)}, unless",
        f"`timeout` (default {spelled(generations.MEMBERS_WAIT_SECONDS / 60)} minutes)",
        f"waits {keeper.RESTARTS.first:g} s before the first restart, and twice as long before each further one, up to "
        f"{keeper.RESTARTS.most:g} s",
        f"restarted within {local_keeper.REFOUND_OLD_SECONDS:g} s does the run continue",
        f"chunks of {size(manifest.STATE_CHUNK_BYTES)}",
        f"takes more than a {every(progress_bar.PROGRESS_SECONDS)} shows a progress bar",
        f"wait `patience` ({SET.patience:g} s) for the others",
    ),
    "docs/guides/engines.md": (
        f"a port from {environment.SLURM_PORTS[0] + environment.PORT_OFFSET:,} to "
        f"{environment.SLURM_PORTS[-1] + environment.PORT_OFFSET:,} that depends on the job",
        f"put {2 * secret.KEY_BYTES} hexadecimal digits",
        f"rank 0 listens at {environment.MASTER_PORT + environment.PORT_OFFSET}",
    ),
    "docs/guides/first-cluster.md": (
        f"with Python {PYTHON} or newer on both",
        f"as soon as {spelled(run.MIN_HOSTS)} machines agree",
        f"a run needs at least {spelled(run.MIN_HOSTS)} machines to begin",
        f"within a {every(environment.CLUSTER_JOIN_SECONDS)} of each other",
        f"`doctor` explains within {spelled(math.ceil(doctor.DEADLINE_SECONDS))} seconds",
        f"(the first node takes {settings.NODE_PORTS[0]})",
        f"from {settings.NODE_PORTS[0]} to {settings.NODE_PORTS[-1]} (`COVEY_PORT`",
        f"`ufw allow {settings.NODE_PORTS[0]}:{settings.NODE_PORTS[-1]}/tcp`",
        f"# listens at port {settings.RELAY_PORT};",
        f"It listens at port {settings.RELAY_PORT} as well",
        f"which is tried again every {every(dialer.SEEK_SECONDS)}",
        f"is a join code, {2 * secret.KEY_BYTES} hexadecimal digits",
    ),
    "docs/guides/measuring.md": (
        f"Each stream takes {pairs.turns_in(terms.PAIR_SECONDS)[1]:g} s",
        f"median of up to {pairs.PINGS} small messages",
        f"takes over {network_session.SLOW_SECONDS:g} s is timed once",
        f"green from {spelled(report.FAST_SHARE).replace('half', 'a half')}, "
        f"yellow from {spelled(report.SLOW_LINK_SHARE)}",
        f"more than {terms.PAIR_SECONDS:g} s, for links",
        f"Up to {spelled(terms.ALONE_UP_TO)} ranks, one pair is measured at a time, which takes "
        f"{math.comb(terms.ALONE_UP_TO, 2) * terms.PAIR_SECONDS:.0f} s for {spelled(terms.ALONE_UP_TO)}. With "
        f"more ranks, up to {sweep.MAX_RANKS},",
    ),
    "docs/guides/metrics.md": (
        f"of the last {every(samples.WINDOW_NS / 1e9)}, or since",
        f"since the first of the last {recorder.RECORDS} operations",
        f"Every rank remembers the last {recorder.RECORDS} operations",
        f"The newest {flight.FLIGHT_FILES_LIMIT} files are kept",
        f"from the remembered operations {times(1 / spans.EVERY_SECONDS)} a second",
        f"more than {recorder.RECORDS} operations of a group end within a second, there are spans of the last "
        f"{recorder.RECORDS}",
    ),
    "docs/guides/networks.md": (
        f"After the {nth(planner.MEASURING)} `all_reduce` of {size(choose.PLANNED_BYTES)} or more",
        f"what the slowest line carries in a {every(measurement.MOST_SECONDS)} if that is less",
        f"about {percent(1 / measurement.PARTS)} of what it takes, or by "
        f"{1000 * measurement.LEAST_PART_SECONDS:g} ms if that is more, "
        f"and never for a {every(measurement.MOST_SECONDS)}",
        f"at most {percent(planner.COST)} of the time of large sums",
        f"when sums take {times(size_class.CHANGE)} as long as they did",
        f"every {size_class.DRIFT_CALLS} large sums",
        f"the latest {figures.MAX_FIGURES:,} figures",
        f"older than {spelled(saved_figures.OLDEST_SECONDS / 86400)} days",
        f"(`COVEY_METERED`, by default `{SET.metered}`)",
        f"round trips are longer than {ms(network.NEAR_TRIP_SECONDS)}, also plans",
        f"Its first {spelled(planner.CHECKING)} sums are timed",
        f"of which {size(choose.PLANNED_BYTES)} or more travels",
        f"arrays below {size(choose.PLANNED_BYTES)} and `topk`",
        f"arrays of more than {size(SET.doubling_bytes)} (`doubling_bytes`)",
        f"tried with {size(path_monitor.TRIAL_BYTES)} each",
        f"at least {spelled(stripes.LEAST_NETWORK_SHARE)} of what the lane does becomes part",
        f"After {size(stripes.JUDGED_BYTES)} the lane must be at least {spelled(trials.CLEAR_GAIN - 1)} faster",
        f"begins with {lane_kinds.STREAMS_BY_ROUND_TRIP[0][1]} or {lane_kinds.HELPED_STREAMS} below a round trip of "
        f"{ms(lane_kinds.STREAMS_BY_ROUND_TRIP[0][0])}, {lane_kinds.STREAMS_BY_ROUND_TRIP[1][1]} below "
        f"{ms(lane_kinds.STREAMS_BY_ROUND_TRIP[1][0])}, and {lane_kinds.STREAMS_FAR} from there on",
        f"round trip is {ms(trials.FAR_ROUND_TRIP)} or longer, a lane that is sending for "
        f"{spelled(trials.LEAST_SENDING_SHARE)} of the time or more tries "
        f"{times(trials.GROWTH)} as many, up to "
        f"{settings.STREAMS_LIMIT}",
        f"if {spelled(trials.LOOKS)} measurements in a row",
        f"are all at least {spelled(trials.CLEAR_GAIN - 1)} faster",
        f"again after {trials.FIRST_REST_SECONDS:g} seconds, then {2 * trials.FIRST_REST_SECONDS:g}, "
        "and later every "
        f"{trials.MOST_REST_SECONDS / 60:g} minutes",
        f"fewer records ({size(seal.SPREAD_RECORD_LIMIT)}) than streams",
        f"From {overlay.FULL_UP_TO + 1} nodes on",
        f"idle for {spelled(resting_links.LINK_IDLE_SECONDS)} seconds",
        f"`auto` is `full` up to {overlay.FULL_UP_TO} nodes",
        f"If they are {percent(connections.LOSSY)} or more, the lane uses BBR",
        f"noticed after {line.MOVED_SECONDS:g} seconds if the machine is found on another network, and otherwise after "
        f"{line.DEAD_PATH_SECONDS:g}",
    ),
    "docs/guides/observing.md": (
        f"by rank: {names(STATES[:-1])} or `{STATES[-1]}`, since when",
        f"from the members, up to {reports.REPORTED_EVENTS_LIMIT}.",
        f"begins with the last {spelled(events.KEPT)} events",
        f"Keys have up to {store.KEY_LIMIT:,} characters, values up to {size(store.VALUE_LIMIT)}, and there is room "
        f"for {size(store_rules.STORE_BYTES)} in all",
    ),
    "docs/guides/operations.md": (
        f"has {size(2 * SET.ring_bytes)} of shared memory (`ring_bytes`, in each direction)",
        f"large sums of up to {choose.DIRECT_RANKS} ranks that share memory",
        f"A run has up to {numbers.MAX_MEMBERS:,} ranks with",
        f"open groups up to {views.OPEN_RANKS:,} ranks in all: {views.OPEN_RANKS // numbers.MAX_MEMBERS} "
        f"groups of {numbers.MAX_MEMBERS:,}",
        f"| {settings.NODE_PORTS[0]} to {settings.NODE_PORTS[-1]} | TCP |",
        f"| {responder._MDNS_PORT} | UDP, multicast |",
        f"`MASTER_PORT` + {environment.PORT_OFFSET} ({environment.MASTER_PORT + environment.PORT_OFFSET}) | TCP",
        f"| {settings.RELAY_PORT} | TCP | `covey relay`",
        f"valid for {spelled(clusters.GRACE / 60)} minutes (`--grace",
    ),
    "docs/guides/pytorch.md": (
        f"up to {store_rules.STORE_ENTRIES_LIMIT} entries of {size(store_rules.STORE_BYTES)} in total",
        f"tensors over {size(in_source('torch/backend/operands.py', 'DEVICE_PIECE_BYTES'))} are sent in pieces",
    ),
    "docs/guides/running.md": (
        f"# force a kind of lane: {', '.join(LANES[:-1])} or {LANES[-1]}",
        f"again every {spelled(output.RETRY_SECONDS)} seconds",
        f"once the folder is a {every(runs.YOUNG_FOLDER_SECONDS)} old",
        f"(default {environment.MASTER_PORT})",
        f"default {environment.LAUNCH_JOIN_SECONDS / 60:g} minutes)",
        f"Rank 0 listens at `MASTER_PORT + {environment.PORT_OFFSET}`",
    ),
    "docs/guides/services.md": (
        f"one of the last {checkpoint.IDS_LIMIT} checkpoints",
        f"It needs {spelled(len(Strategy.__abstractmethods__))} things: "
        f"{names([name for name in vars(Strategy) if name in Strategy.__abstractmethods__][:-1])} and `shutdown`",
        f"takes more than {spelled(checks.READINESS_CHECK_SECONDS)} seconds has failed",
        f"Calls that have begun get {spelled(shutdown.CALLS_SECONDS)} seconds",
        f"with a deadline ({spelled(shutdown.CLOSER_SECONDS)} seconds, or `timeout=`)",
        f"gives its ranks {supervisor.SIGNAL_GRACE:g} seconds after SIGTERM",
    ),
    "docs/guides/several-machines.md": (
        f"is gone for {launching.LEASE_SECONDS:g} seconds",
        f"remembers the last {jobs.ENDED_LIMIT}.",
        f"keeps the last {size(jobs.LOG_BYTES)} of the output",
        f"{snapshot.SNAPSHOT_FILES_LIMIT:,} files of {size(snapshot.FOLDER_BYTES)} in all",
        f"The last {environments.ENVIRONMENTS_LIMIT} environments",
    ),
    "docs/reference/commands.md": (
        f"the last {size(jobs.LOG_BYTES)} of each program",
        f"and SIGKILL {supervisor.SIGNAL_GRACE:g} seconds later",
        f"Turns of each side, {spelled(ddp.STEPS)} steps each",
        f"one if it takes over {spelled(bench_compress.MEASURED_ONCE_SECONDS)} seconds",
    ),
    "docs/reference/settings.md": (
        f"under `covey run`, on at least {run.MIN_HOSTS} machines",
        f"Under a launcher, the default is {environment.LAUNCH_JOIN_SECONDS:g}",
        f"`auto` is `kregular` for more than {overlay.FULL_UP_TO} nodes",
        f"After {spelled(SILENCES.suspect_least / SILENCES.heartbeat)} times that, a peer is suspected",
        f"After the first {size(lane_kinds.LARGE_RINGS_TOTAL_BYTES)} of a process, lanes get at most "
        f"{size(rings.SMALL_RING_BYTES)}",
    ),
}
"""What each page says, made from the constants that it is about. Each stands on its page once."""


def written() -> dict[str, list[str]]:
    """Return the entries of `HELD` as this file writes them: with the names of the constants."""
    tree = ast.parse(Path(__file__).read_text())
    table = next(
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "HELD"
    )
    assert isinstance(table, ast.Dict)
    return {
        ast.literal_eval(page): [ast.unparse(entry) for entry in entries.elts]
        for page, entries in zip(table.keys, table.values, strict=True)
        if page is not None and isinstance(entries, ast.Tuple)
    }


@pytest.mark.parametrize("page", HELD)
def test_the_numbers_of_a_page_are_those_of_the_code(page: str) -> None:
    text, wrong = words(page), []
    for said, source in zip(HELD[page], written()[page], strict=True):
        found = len(re.findall(rf"(?<![\w.]){re.escape(said)}(?!\w)", text))
        if found != 1:
            wrong.append(f"{page} says {found} times, instead of once, {said!r}, which is {source}")
    assert not wrong, "\n".join(wrong)


LISTS = {
    ("docs/concepts/lanes-and-plans.md", "lane"): {*LANES, "memory"},
    ("docs/concepts/lanes-and-plans.md", "`algorithm=`"): {*choose.ALL_REDUCE_PLANS, *choose.ROOTED_PLANS},
    ("docs/concepts/membership.md", "verdict"): {fate.name for fate in membership.Fate},
    ("docs/guides/chaos.md", "fault | what is done"): {*faults.known("command")},
    ("docs/guides/chaos.md", "fault | on one machine"): {*faults.known("machine"), *faults.known("hosts")},
}
"""The first columns of tables, by page and head."""


@pytest.mark.parametrize(("page", "head"), LISTS)
def test_a_table_lists_what_the_code_has(page: str, head: str) -> None:
    rows = (ROOT / page).read_text().partition(f"\n| {head} |")[2].partition("\n\n")[0].splitlines()[2:]
    assert {name.strip("`") for row in rows for name in row.split("|")[1].strip().split(", ")} == LISTS[page, head]


def test_the_events_and_the_verdicts_are_named() -> None:
    told = words("docs/guides/observing.md").partition("Events tell what happens to a run:")[2].partition("```")[0]
    assert set(events.EVENT_KINDS) <= set(re.findall(r"`(\w+)`", told))
    verdicts = words("docs/glossary.md").partition("when a member was lost: ")[2].partition(".")[0]
    assert set(re.findall(r"[A-Z]+", verdicts)) == {fate.name for fate in membership.Fate}


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "docs" / "design.md", ROOT / "docs" / "glossary.md"]
PAGES += [page for folder in ("concepts", "guides") for page in sorted((ROOT / "docs" / folder).glob("*.md"))]
FILES = [path.relative_to(ROOT) for path in ROOT.glob("*")]
FILES += [path.relative_to(ROOT) for path in ROOT.glob("[!.]*/**/*") if "__pycache__" not in path.parts]
OF_USERS = {
    "train.py",
    "dist/",
    "site/",
    "runs/",
    "agent/runs/",
    "ssh/runs/",
    "clusters/",
    "identities/",
    "audit/",
    "lora/",
}
"""Paths of a user's program, of what `make` builds, and of covey's configuration folder."""


def file_of(name: str) -> Path | None:
    """Return the file or folder that a page means: the end of its path is enough, and it may have wildcards."""
    return next((path for path in FILES if path.match(name)), None)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_files_and_names_of_a_page_exist(page: Path) -> None:
    text = page.read_text()
    for name in re.findall(r"`((?:[\w*-]+/)*(?:[\w*-]+/|[\w*-]+\.(?:py|c|h|txt|proto|yaml|sbatch)))`", text):
        assert name in OF_USERS or file_of(name), f"{page.name}: there is no {name}"
    placed = re.findall(r"`(\w+)`(?: there)? (?:of|in) `([\w/]+\.py)`", text)  # `LANES` of `base/settings.py`
    placed += [(name, file) for file, name in re.findall(r"`([\w/]+\.py)`: `(?:\w+\.)?(\w+)`", text)]  # in walks
    for name, file in placed:
        code = (ROOT / (file_of(file) or "")).read_text()
        defined = re.search(rf"^(?:{name}\b| *(?:class|def) {name}\b)", code, re.MULTILINE)
        assert defined, f"{page.name}: {file} does not define {name}"
    if page.name != "CONTRIBUTING.md":  # which also has the variables of tests
        assert set(re.findall(r"\bCOVEY_\w*[A-Z]\b", text)) <= set(KNOWN_VARIABLES)
