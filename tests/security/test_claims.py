"""What `docs/security.md` says has tests that could fail, and the numbers of the code.

Every sentence of the sections below is listed with the tests that hold it: who changes a sentence changes its tests.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from covey.base.text import TEXT_LIMIT
from covey.net import audit as audit_log
from covey.net import clusters, descriptors, mdns, sieve
from covey.runtime import (
    allowance,
    arrivals,
    audit,
    candidate,
    entrance,
    follower,
    gathering,
    greet,
    hints,
    reach,
    visitors,
)
from covey.wire import frame, messages, seal

ROOT = Path(__file__).parents[2]
SECURITY = (ROOT / "docs" / "security.md").read_text()
SEE, DO, BOUNDS = "What strangers can see", "What strangers can make a node do", "Bounds"
OWNER, REMOVING = "The owner key", "Removing a node"
AUDIT, DEPENDENCIES = "The audit log", "Dependencies"

CLAIMS: dict[str, dict[str, list[str]]] = {
    OWNER: {
        "`covey init` makes an Ed25519 key pair, the owner key": [
            "io/test_owner.py::test_init_makes_an_owner_key_that_enroll_pins_and_does_not_have",
        ],
        "Its private half stays on that machine": [
            "io/test_owner.py::test_init_makes_an_owner_key_that_enroll_pins_and_does_not_have",
        ],
        "Its public half is in the join code, so `covey enroll` pins it": [
            "io/test_owner.py::test_init_makes_an_owner_key_that_enroll_pins_and_does_not_have",
            "unit/wire/test_secret.py::test_a_join_code_brings_back_name_key_seeds_and_owner",
        ],
        "A machine takes a change of the cluster from the network only with a signature": [
            "security/test_owner.py::test_a_visitor_with_a_fresh_key_cannot_replace_the_secret",
            "security/test_owner.py::test_the_owner_can_replace_the_secret_through_any_member",
        ],
        "has pinned no owner, and takes no change from the network at all": [
            "security/test_owner.py::test_a_machine_that_knows_no_owner_takes_no_new_secret_from_the_network",
            "e2e/test_secret_rotate.py::test_a_machine_that_knows_no_owner_takes_no_new_secret",
        ],
        "A new secret is signed for one node": [
            "unit/wire/test_owner.py::test_a_signature_of_a_new_secret_is_good_for_this_very_change_and_receiver",
            "security/test_owner.py::test_the_parts_of_a_signed_change_cannot_be_exchanged",
        ],
        "The node takes it only if the id is its own, the old secret is the one it has": [
            "security/test_owner.py::test_a_secret_that_was_signed_for_another_node_is_not_taken",
            "security/test_owner.py::test_an_older_change_of_the_secret_that_is_repeated_is_not_taken",
        ],
        "So a visitor with a fresh key, a repeated change, a change for another node": [
            "security/test_owner.py::test_a_visitor_with_a_fresh_key_cannot_replace_the_secret",
            "security/test_owner.py::test_an_older_change_of_the_secret_that_is_repeated_is_not_taken",
            "security/test_owner.py::test_a_secret_that_was_signed_for_another_node_is_not_taken",
            "security/test_owner.py::test_a_secret_that_another_owner_signed_is_not_taken",
        ],
        "Losing the owner key means making a new cluster": [
            "e2e/test_secret_rotate.py::test_the_secret_is_changed_only_where_the_owner_key_is",
        ],
        "A person who copies it can change the secret of every member that it can reach": [
            "security/test_owner.py::test_the_owner_can_replace_the_secret_through_any_member",
            "io/test_owner.py::test_an_owner_key_that_others_may_read_is_refused",
        ],
    },
    REMOVING: {
        "`covey secret rotate`, on the machine with the owner key, makes a new secret": [
            "e2e/test_secret_rotate.py::test_nodes_that_run_keep_the_new_secret_and_their_run_goes_on",
            "e2e/test_secret_rotate.py::test_a_denied_node_gets_nothing",
            "e2e/test_secret_rotate.py::test_nothing_changes_unless_the_person_says_yes",
        ],
        "This is how you remove a person who has the secret": [
            "e2e/test_secret_rotate.py::test_a_new_secret_goes_only_to_the_nodes_that_are_named",
        ],
        "Runs go on: processes that run on a machine follow its cluster's file within two seconds": [
            "e2e/test_rotation.py::"
            "test_a_run_goes_on_through_a_new_secret_and_takes_in_a_newcomer_that_knows_only_that",
            "security/test_rotation.py::test_two_nodes_find_each_other_when_one_knows_only_the_new_secret",
        ],
        "For ten minutes (`--grace SECONDS`) a node also accepts the secret before": [
            "security/test_rotation.py::test_links_stay_and_both_secrets_are_good_until_the_grace_is_over",
            "security/test_rotation.py::test_the_grace_ends_by_itself",
            "security/test_rotation.py::"
            "test_lanes_to_a_node_that_has_not_heard_of_a_new_secret_are_opened_with_the_one_before",
            "security/test_rotation.py::test_a_door_key_of_one_secret_does_not_go_with_the_certificate_of_the_other",
            "e2e/test_rotation.py::test_a_member_that_has_not_heard_of_a_new_secret_stays_in_its_run_during_the_grace",
        ],
        "A node that did not get the new secret keeps the links it has": [
            "security/test_rotation.py::test_links_stay_and_both_secrets_are_good_until_the_grace_is_over",
            "security/test_rotation.py::test_enrolling_by_hand_gives_a_running_node_the_new_secret",
        ],
        "With `--grace 0` the old secret is refused at once": [
            "security/test_rotation.py::test_without_a_grace_the_old_secret_is_refused_at_once",
        ],
        "`covey deny NODE` on the machine with the owner key makes a *charter*": [
            "e2e/test_charter.py::test_a_run_goes_on_without_a_node_that_the_owner_denies",
            "unit/wire/test_owner.py::test_no_two_charters_have_the_same_words",
        ],
        "members show each other the latest one in their greetings and when it changes": [
            "security/test_charter.py::test_a_node_that_was_approved_shows_the_charter_to_one_that_has_missed_it",
            "security/test_charter.py::test_members_pass_a_charter_on_and_show_it_to_nodes_that_come",
            "security/test_charter.py::test_a_charter_reaches_a_node_through_another_one",
        ],
        "A member obeys the charter with the latest serial number that its pinned owner key verifies": [
            "security/test_charter.py::test_only_the_owner_makes_charters_and_the_latest_counts",
            "security/test_charter.py::test_a_node_that_knows_no_owner_obeys_no_charter",
        ],
        "It ends its links with a denied node at once, gives that node up as lost": [
            "security/test_charter.py::test_a_charter_ends_the_links_of_a_denied_node_at_once_and_refuses_new_ones",
            "e2e/test_charter.py::test_a_run_goes_on_without_a_node_that_the_owner_denies",
            "e2e/test_charter.py::test_a_keeper_holds_no_denied_process_in_its_run",
        ],
        "The denied process itself ends its group with `ClosedError` and that text": [
            "e2e/test_charter.py::test_a_run_goes_on_without_a_node_that_the_owner_denies",
        ],
        "On any other machine `covey deny NODE` holds for the nodes of that machine only": [
            "e2e/test_charter.py::test_a_denial_on_another_machine_holds_there_and_for_what_runs_there",
        ],
        "Processes that run there obey it within two seconds": [
            "security/test_charter.py::test_a_running_node_obeys_what_commands_write_to_the_file_within_two_seconds",
        ],
        "No machine denies itself": ["e2e/test_charter.py::test_a_machine_does_not_deny_itself"],
        "Lists name machines": ["io/test_charter.py::test_what_is_said_of_a_machine_holds_for_all_its_nodes"],
        "A machine is known by its first node key": [
            "io/test_charter.py::test_all_nodes_of_a_machine_name_its_first_key",
            "io/test_charter.py::test_a_card_that_names_another_machine_without_its_signature_is_refused",
            "security/test_charter.py::test_denying_a_machine_denies_its_other_nodes",
        ],
        "A member that holds the secret can still make a fresh key that names no machine": [
            "security/test_charter.py::test_only_the_owner_makes_charters_and_the_latest_counts",
        ],
        "`covey allow --ask on` makes the charter a list of the only machines": [
            "e2e/test_charter.py::test_with_the_list_on_a_new_machine_waits_until_it_is_approved",
        ],
        "A node that proves the secret but is not on the list is refused": [
            "security/test_charter.py::test_with_a_list_a_fresh_key_is_refused_although_it_holds_the_secret",
            "e2e/test_charter.py::test_an_unapproved_machine_is_told_where_to_ask",
            "security/test_charter.py::"
            "test_a_node_that_hears_that_it_is_not_on_the_list_goes_on_waiting_and_a_denied_one_does_not",
        ],
        "Each member remembers the last 64 of them": [
            "security/test_charter.py::test_nodes_that_wait_are_bounded_however_many_come",
            "e2e/test_charter.py::test_with_the_list_on_a_new_machine_waits_until_it_is_approved",
        ],
        "and `covey allow --ask off` take these steps back": [
            "e2e/test_charter.py::test_an_unapproved_machine_is_told_where_to_ask",
            "e2e/test_charter.py::test_a_run_goes_on_without_a_node_that_the_owner_denies",
        ],
        "Runs of torchrun, mpirun and srun read the lists and the secret when they start": [
            "security/test_handshake.py::test_a_denied_node_is_no_rank_of_a_launcher_either",
            "security/test_handshake.py::test_a_node_that_is_not_on_the_list_is_no_rank_of_a_launcher",
        ],
        "A copied configuration folder (a disk image, a synchronised home) gives two machines one identity": [
            "io/test_gathering.py::test_an_identity_in_use_elsewhere_is_refused_and_the_later_one_is_told",
        ],
        "Delete `identities/` in the copy": [
            "io/test_gathering.py::test_an_identity_in_use_elsewhere_is_refused_and_the_later_one_is_told",
        ],
    },
    SEE: {
        "That two machines talk, when, and how much": [
            "security/test_secrecy.py::test_what_two_nodes_exchange_tells_nothing_to_who_captures_all_of_it",
        ],
        "Multicast announcements (mDNS) carry addresses, a port": [
            "unit/wire/test_beacon.py::test_an_announcement_shows_nothing_that_two_of_them_have_in_common_but_port_and_addresses",
            "security/test_multicast.py::test_two_announcements_of_one_node_have_nothing_in_common_but_where_it_is",
            "io/test_mdns.py::test_nothing_on_the_wire_names_host_or_key",
        ],
        "They are sent only while a node joins or runs": [
            "io/test_mdns.py::test_nothing_on_the_wire_names_host_or_key",
            "io/test_mdns.py::test_closing_at_any_moment_of_the_start_leaves_nothing",
        ],
        "A stranger that passes a connection on sees that two nodes belong together": [
            "security/test_handshake.py::test_a_stranger_that_passes_on_an_answer_to_the_door_sees_no_certificate",
            "security/test_handshake.py::"
            "test_a_stranger_that_passes_everything_on_sees_nothing_that_names_a_node_or_its_cluster",
            "security/test_handshake.py::test_an_answer_to_the_door_is_good_for_one_client_hello_only",
            "io/test_tls.py::test_an_acceptor_asks_for_no_second_client_hello",
        ],
    },
    DO: {
        "Everybody on a network can repeat what was announced there": [
            "netns/test_strangers.py::"
            "test_announcements_that_a_stranger_repeats_open_few_sockets_and_none_beyond_the_network",
        ],
        "Addresses are inside the tag, so none can be added or exchanged": [
            "security/test_multicast.py::test_only_addresses_inside_the_tag_are_believed",
            "unit/wire/test_beacon.py::test_an_address_can_neither_be_added_nor_taken_away_nor_moved_to_another_family",
        ],
        "A node follows an announcement only if a holder of the secret made it, only once": [
            "security/test_multicast.py::test_announcements_of_strangers_are_never_dialled",
            "security/test_multicast.py::test_an_announcement_that_a_stranger_repeats_is_followed_like_one",
            "security/test_multicast.py::"
            "test_addresses_that_are_not_on_the_network_where_they_were_heard_are_not_dialled",
            "security/test_members.py::test_loopback_addresses_of_a_member_elsewhere_are_not_ours",
            "unit/net/test_interfaces.py::test_an_address_is_on_the_link_of_one_interface_or_not",
        ],
        "Nodes announce themselves anew every minute, under a fresh tag": [
            "io/test_mdns.py::test_a_node_is_announced_anew_under_a_fresh_tag_and_an_announcement_counts_once",
            "unit/runtime/test_hints.py::test_fresh_evidence_is_good_for_one_more_try",
        ],
        "What leads nowhere is tried six times with growing pauses": [
            "unit/runtime/test_hints.py::test_a_hint_that_leads_nowhere_is_tried_with_growing_pauses_and_then_no_more",
            "unit/runtime/test_hints.py::test_fresh_evidence_brings_a_try_forward_and_shortens_no_pause_after_it",
        ],
        "What a member told of is also tried every five minutes, for an hour": [
            "unit/runtime/test_hints.py::"
            "test_what_a_member_told_of_is_tried_again_after_a_nap_a_bounded_number_of_times",
        ],
        "At most 32 sockets are being opened at a time because of what others said": [
            "netns/test_strangers.py::"
            "test_announcements_that_a_stranger_repeats_open_few_sockets_and_none_beyond_the_network",
            "security/test_members.py::test_hints_of_a_member_open_a_few_sockets_at_a_time",
            "unit/runtime/test_allowance.py::test_so_many_are_opened_at_a_time_and_so_many_a_second",
        ],
        "Packets that are not about covey, have an unusual size": [
            "security/test_multicast.py::test_packets_of_unusual_size_are_counted_and_not_looked_at",
            "unit/net/test_sieve.py::test_one_source_may_say_so_much_and_all_together_so_much",
            "unit/cli/test_doctor_findings.py::test_a_flood_of_multicast_is_noticed_and_a_few_packets_too_many_are_not",
        ],
        "Of what is looked at nothing is stored but the tags": [
            "netns/test_strangers.py::test_a_flood_of_inventions_leaves_memory_as_it_was",
        ],
        "The last 64 that a process may have": [
            "netns/test_strangers.py::test_a_stranger_does_not_take_the_descriptors_of_a_running_job",
            "io/test_entrance.py::test_the_last_descriptors_are_not_for_strangers",
        ],
        "A process that has none left goes on with what it has begun": [
            "e2e/test_scarcity.py::test_a_group_without_a_descriptor_left_goes_on_and_says_what_to_do",
            "e2e/test_scarcity.py::test_a_process_that_can_open_nothing_is_told_so_when_it_joins",
            "io/test_scarcity.py::test_addresses_are_kept_true_after_a_shortage",
            "unit/net/test_descriptors.py::"
            "test_what_a_node_promises_is_written_down_even_if_all_descriptors_are_used_up",
        ],
        "Lines that others can cause are written at most every few seconds": [
            "security/test_door.py::test_strangers_leave_one_line_in_the_log_however_many_they_are",
            "security/test_members.py::test_a_member_that_comes_again_and_again_with_nonsense_leaves_few_lines",
            "netns/test_strangers.py::"
            "test_announcements_that_a_stranger_repeats_open_few_sockets_and_none_beyond_the_network",
        ],
    },
    AUDIT: {
        "Every machine notes what happens to its nodes in `audit/log.jsonl`": [
            "e2e/test_audit.py::test_nodes_that_join_and_leave_and_one_that_is_killed_are_in_the_logs_of_both_machines",
            "e2e/test_audit.py::test_a_node_that_leaves_in_good_order_has_left_and_is_not_lost",
            "netns/test_audit.py::test_each_machine_notes_the_run_its_members_and_where_it_met_them",
            "e2e/test_audit.py::test_a_stranger_is_noted_by_a_real_node",
            "e2e/test_audit.py::test_a_machine_with_another_secret_is_told_on_both_sides",
            "e2e/test_audit.py::test_what_people_do_with_secrets_and_nodes_is_noted",
            "e2e/test_audit.py::test_a_run_that_receives_a_new_secret_notes_that",
            "security/test_audit.py::test_a_denied_node_and_another_version_are_noted_by_the_key_they_proved",
        ],
        "`covey audit` shows it": ["e2e/test_audit.py::test_entries_are_chosen_by_cluster_time_and_event"],
        "The log holds no secrets": ["e2e/test_audit.py::test_what_people_do_with_secrets_and_nodes_is_noted"],
        "Each entry has a number and the SHA-256 of the line before it": [
            "io/test_audit.py::test_entries_are_private_numbered_and_chained",
        ],
        "exits with 1 if a line was changed, moved, added or removed, at the end, too": [
            "io/test_audit.py::test_tampering_is_found",
            "io/test_audit.py::test_a_file_that_was_removed_is_missed",
            "e2e/test_audit.py::test_tampering_makes_verify_fail_with_1",
        ],
        "a process with your rights can write the whole log anew": ["io/test_audit.py::test_tampering_is_found"],
        "keep the hash that `--verify` prints on another machine": [
            "e2e/test_audit.py::test_tampering_makes_verify_fail_with_1",
            "e2e/test_audit.py::test_follow_shows_entries_as_they_come_and_ends_with_ctrl_c",
        ],
        "Names and reasons that other nodes wrote are escaped and at most 300 characters long": [
            "io/test_audit.py::test_what_others_wrote_cannot_move_a_cursor_or_forge_a_line",
            "security/test_audit.py::test_a_members_name_reaches_the_log_as_printable_text",
            "e2e/test_audit.py::test_a_log_that_was_changed_by_hand_moves_no_cursor",
        ],
        "What strangers can cause is bounded": [
            "security/test_audit.py::test_a_flood_of_strangers_is_bounded_in_the_log_and_counted",
            "unit/runtime/test_audit.py::test_a_flood_of_one_stranger_is_a_few_entries_and_their_number_is_kept",
            "unit/runtime/test_audit.py::test_a_flood_of_many_sources_is_bounded_too",
            "unit/runtime/test_audit.py::test_what_was_left_out_is_told_after_a_while",
        ],
        "The file is turned over at 4 MiB, and 4 old ones stay": [
            "io/test_audit.py::test_the_log_is_turned_over_and_bounded_and_its_chain_goes_on",
        ],
        "no node waits for the log before it joins": [
            "e2e/test_audit.py::test_joining_and_leaving_do_not_wait_for_the_log",
            "e2e/test_audit.py::test_a_log_that_cannot_be_written_is_told_once_and_the_run_goes_on",
            "unit/runtime/test_audit.py::test_noting_does_not_wait_for_the_log",
        ],
        "Entries of the last moments may be missing after a crash": [
            "io/test_audit.py::test_what_killed_writers_wrote_is_whole_and_others_go_on",
            "io/test_audit.py::test_a_line_that_was_cut_off_is_kept_and_told_and_is_no_tampering",
        ],
        "Runs of one machine alone, and visits (`covey status`), note nothing": [
            "e2e/test_audit.py::test_a_run_of_one_machine_and_a_visit_note_nothing",
        ],
    },
    DEPENDENCIES: {
        "a file that was exchanged on an index or on the way is not installed": [
            "unit/tools/test_lock.py::test_pip_takes_only_files_whose_hashes_are_in_a_lock",
            "unit/tools/test_lock.py::test_what_make_installs_is_checked_against_the_lock",
            "unit/tools/test_lock.py::test_what_is_installed_here_is_what_the_lock_says",
        ],
        "The lock has the files for all platforms, names no index": [
            "unit/tools/test_lock.py::test_the_hashes_are_for_other_platforms_and_pythons_too",
            "unit/tools/test_lock.py::test_every_line_of_the_lock_is_exact_and_hashed_and_none_names_an_index",
            "unit/tools/test_lock.py::test_the_lock_satisfies_what_is_asked_for",
            "unit/tools/test_lock.py::test_the_lock_has_all_that_its_packages_need",
        ],
        "torch alone is pinned by its version only": [
            "unit/tools/test_lock.py::test_torch_is_pinned_in_a_file_of_its_own",
        ],
        "every package that covey needs to run, with version, licence, hashes and what it needs itself": [
            "unit/tools/test_sbom.py::test_it_has_the_form_of_cyclonedx",
            "unit/tools/test_sbom.py::test_it_names_the_wheel_by_its_hash",
            "unit/tools/test_sbom.py::test_it_is_complete_by_what_is_installed",
            "unit/tools/test_sbom.py::test_its_hashes_are_those_of_the_lock",
        ],
        "The ranges in `pyproject.toml` allow other versions than these": [
            "unit/tools/test_lock.py::test_the_lock_satisfies_what_is_asked_for",
        ],
    },
}
ELSEWHERE: dict[str, list[str]] = {
    "Every reader of bytes from the network is fuzzed: it returns a value or raises the error that it promises": [
        "security/test_decoders.py::test_a_reader_of_bytes_keeps_its_contract",
        "security/test_decoders.py::test_the_inputs_reach_every_line_and_branch_of_the_readers",
        "security/test_decoders.py::test_every_decoder_of_messages_has_a_target",
        "security/test_decoders.py::test_the_fuzz_notices_a_reader_that",
    ],
    "whatever one member says, the cores of the others raise nothing else, keep a bounded amount": [
        "sim/test_hostile.py::test_a_hostile_member_breaks_no_honest_one",
        "sim/test_hostile.py::test_the_play_notices_a_member_that",
        "unit/proto/test_formation.py::test_rivals_that_a_peer_makes_up_are_bounded_and_an_older_one_is_still_noticed",
    ],
    "what a flood costs a node is [bounded](#bounds)": [
        "security/test_floods.py::test_a_flood_of_strangers_hardly_slows_a_group_and_keeps_no_member_out",
    ],
    "do not pass it on: processes of a cluster's run get the secret through a pipe": [
        "security/test_secrecy.py::test_a_secret_given_by_the_environment_is_in_no_child_of_any_group",
        "security/test_secrecy.py::test_a_secret_given_by_the_environment_is_in_no_child_no_log_and_no_file",
    ],
    "Anyone else is hung up on before a single byte is parsed, before TLS, before memory": [
        "security/test_door.py::test_garbage_at_the_door_ends_the_connection_at_once",
        "security/test_door.py::test_another_clusters_key_does_not_open_the_door_for_anything",
    ],
    "At most 32 connections are at the door at a time": [
        "security/test_door.py::test_a_stranger_costs_no_more_than_a_place_at_the_door",
        "io/test_entrance.py::test_in_a_crowd_those_from_a_members_address_stay",
    ],
    "the oldest goes of the source that has most of them, and those of members' addresses go last": [
        "io/test_entrance.py::test_in_a_crowd_the_source_with_most_connections_gives_way",
        "io/test_entrance.py::test_in_a_crowd_those_from_a_members_address_stay",
    ],
    "A source is an IPv4 address or an IPv6 network of 64 bits": [
        "unit/runtime/test_arrivals.py::test_an_ipv6_source_is_its_network_of_64_bits",
    ],
    "After a burst of 256 it may send 64 connections a second that do not prove the secret": [
        "unit/runtime/test_arrivals.py::test_a_source_has_a_burst_and_a_rate_and_another_source_has_its_own",
        "io/test_entrance.py::test_a_source_that_sends_too_many_strangers_is_not_even_challenged_and_others_are",
        "io/test_entrance.py::test_nodes_that_hold_the_key_may_come_as_often_as_they_like",
    ],
    "What comes too often is closed at once and counted: `covey doctor` shows the numbers": [
        "security/test_door.py::test_a_crowd_without_the_key_is_counted_and_members_get_in_meanwhile",
        "unit/cli/test_doctor_findings.py::test_a_flood_at_the_door_of_a_node_is_told_with_its_numbers",
    ],
    "The answer is bound to the dialler's TLS ClientHello, and the acceptor takes no other": [
        "security/test_handshake.py::test_an_answer_to_the_door_is_good_for_one_client_hello_only",
    ],
    "A certificate names no key but its own, and only a dialler that holds the secret can read it": [
        "security/test_handshake.py::test_a_certificate_names_no_key_but_its_own",
        "security/test_handshake.py::test_a_stranger_that_passes_on_an_answer_to_the_door_sees_no_certificate",
    ],
    "The key of a stream changes every quarter of an hour and after 2^24 records": [
        "contract/test_sealed_lanes.py::"
        "test_every_stream_has_another_key_after_a_quarter_of_an_hour_and_nothing_is_lost",
        "unit/wire/test_seal.py::test_a_record_that_begins_the_next_key_is_marked_and_the_opener_follows_the_mark",
    ],
    "A later key does not tell an earlier one": [
        "unit/wire/test_seal.py::test_a_key_that_was_left_behind_cannot_be_computed_from_the_one_in_use",
    ],
    "There is no fallback to anything older, and no session resumption": [
        "io/test_tls.py::test_older_versions_of_tls_are_not_spoken",
        "io/test_tls.py::test_no_session_is_resumed",
    ],
    "with control characters written as escapes, at most 8000 characters each": [
        "security/test_texts.py::test_no_text_of_a_peer_gets_past_the_decoder_that_is_not_printable_and_short",
        "security/test_texts.py::test_a_hostile_rank_does_not_write_to_the_terminals_of_the_others",
    ],
    "A node has room for 4 links of one key and for 64 visitors in all": [
        "security/test_members.py::test_visitors_of_a_member_are_bounded_and_displace_no_keeper_and_no_member",
        "unit/runtime/test_visitors.py::"
        "test_however_many_keys_come_there_are_so_many_and_the_one_that_asked_last_stays",
    ],
    "It cannot change the cluster's secret or the lists of nodes: these need the owner's signature": [
        "security/test_owner.py::test_a_visitor_with_a_fresh_key_cannot_replace_the_secret",
        "security/test_charter.py::test_only_the_owner_makes_charters_and_the_latest_counts",
    ],
    "A member has at most 4 links with a node": ["security/test_members.py::test_links_of_one_member_are_bounded"],
    "only those that the asker advertises *and* has come from, at the one port where it listens": [
        "security/test_members.py::test_a_member_has_no_other_machine_scanned",
        "security/test_members.py::test_a_probe_proves_an_address_only_to_whom_its_token_belongs",
        "io/test_gathering.py::test_a_node_tries_the_addresses_of_others_only_so_often",
    ],
}


def section(heading: str) -> str:
    return SECURITY.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def plain(text: str) -> str:
    return " ".join(text.split())


def sentences(heading: str) -> list[str]:
    text = re.sub(r"\*\*[^*]+\*\*", "", plain(section(heading)).replace("- **", "**"))
    return [sentence.strip() for sentence in re.split(r"(?<=[.])\s+", text) if sentence.strip()]


@pytest.mark.parametrize("heading", CLAIMS)
def test_every_sentence_is_listed_with_its_tests(heading: str) -> None:
    said = sentences(heading)
    assert said
    for sentence in said:
        held_by = [claim for claim in CLAIMS[heading] if claim in sentence]
        assert len(held_by) == 1, sentence
    assert len(said) == len(CLAIMS[heading])


@pytest.mark.parametrize("claim", ELSEWHERE)
def test_what_is_listed_is_what_the_page_says(claim: str) -> None:
    assert claim in plain(SECURITY)


@pytest.mark.parametrize(
    "name",
    sorted({name for part in (*CLAIMS.values(), ELSEWHERE) for names in part.values() for name in names}),
)
def test_every_test_that_is_listed_exists(name: str) -> None:
    path, _, function = name.partition("::")
    tree = ast.parse((ROOT / "tests" / path).read_text())
    assert function in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_the_bounds_are_those_of_the_code() -> None:
    dials = f"{allowance.SOCKETS}; {allowance.DIALS_RATE:.0f} a second after the first {allowance.DIALS_BURST:.0f}"
    assert visitors.LINKS_PER_KEY == gathering.LINKS_LIMIT
    rows = (
        f"{entrance.STRANGERS_AT_ONCE}; {entrance.GUESTS_AT_ONCE}",
        f"{entrance.STRANGER_SECONDS:.0f}; {greet.GREETING_SECONDS:.0f}",
        f"{arrivals.SOURCE_RATE:.0f}; {arrivals.MEMBER_RATE:.0f}; {arrivals.TOTAL_RATE:.0f}",
        dials,
        f"{hints.HINTS_LIMIT}; {follower.HINTS_AT_ONCE}",
        f"{sieve.SOURCE_RATE:.0f} from one address, {sieve.TOTAL_RATE:.0f} in all",
        f"{visitors.VISITORS_LIMIT}; {visitors.LINKS_PER_KEY}",
        f"{messages.CHARTER_LIMIT}; {messages.WAITING_LIMIT}",
        f"{frame.CONTROL_LIMIT >> 20} MiB; {8 * TEXT_LIMIT} characters",
        f"one in {entrance.TOLD_SECONDS:.0f}, {gathering.TOLD_SECONDS:.0f}, {candidate.NEXT_WORD_SECONDS:.0f} s",
    )
    table = [line.rpartition(" | ")[2].removesuffix(" |") for line in section(BOUNDS).strip().splitlines()[2:]]
    assert table == list(rows)
    words = plain(section(DO))
    assert hints.TRIES == 6
    assert hints.NAPS * hints.NAP_SECONDS == 3600
    assert f"{allowance.SOCKETS} sockets" in words
    assert f"{allowance.DIALS_RATE:.0f} a second after the first {allowance.DIALS_BURST:.0f}" in words
    assert f"more than {sieve.SOURCE_RATE:.0f} a second from one address or {sieve.TOTAL_RATE:.0f} in all" in words
    assert f"{mdns.MOST_KNOWN} at most" in words
    assert f"The last {descriptors.MOST_SPARED}" in words
    assert f"After a burst of {arrivals.SOURCE_BURST:.0f} it may send" in plain(SECURITY)
    log = plain(section(AUDIT))
    assert f"at most {audit_log.TEXT_LIMIT} characters" in log
    assert f"turned over at {audit_log.MOST_BYTES >> 20} MiB, and {audit_log.KEPT} old ones stay" in log
    assert f"a source gets {audit.SOURCE_BURST:.0f} entries, then one in five minutes" in log
    assert f"all strangers together {audit.STRANGERS_BURST:.0f}, then one in {1 / audit.TOTAL_RATE:.0f} s" in log
    assert audit.SUMMARY_SECONDS == 1 / audit.SOURCE_RATE == 300
    assert (reach.RATE, reach.TOTAL_RATE) == (0.5, 4.0)
    assert clusters.GRACE == 10 * 60
    assert (seal.REKEY_SECONDS, seal.REKEY_RECORDS) == (15 * 60, 1 << 24)
