"""Nodes are restarted one after the other under load: nobody notices."""

import threading
import time

from cluster import Cluster, Nginx, wait_until
from conftest import Clients

PUBLISHERS = 4
# Each phase, before and after every restart, has as many confirmed publishes.
PHASE = 150


def test_a_rolling_restart_is_not_noticed(tmp_path, inbox):
    with Cluster(tmp_path, 3, {"CONNECTORS_GCP_DRAIN_DELAY_SECONDS": "3"}) as cluster:
        roll(cluster, inbox)


def roll(cluster, inbox):
    clients = Clients(cluster.behind(Nginx).address)
    topic, name = clients.pair(enable_exactly_once_delivery=True, ack_deadline_seconds=30)
    stop, lock = threading.Event(), threading.Lock()
    confirmed, acked, again, errors = set(), set(), [], []
    delivered = 0

    def handle(message):
        nonlocal delivered
        with lock:
            delivered += 1
            if message.message_id in acked:
                again.append(message.message_id)

        def settled(future):
            with lock:
                if future.exception() is None:
                    acked.add(message.message_id)
                else:
                    errors.append(("ack", repr(future.exception())))

        message.ack_with_response().add_done_callback(settled)

    box = inbox(clients, name, handle)

    def publish():
        number = 0
        while not stop.is_set():
            try:
                confirmed.add(clients.publisher.publish(topic, str(number).encode()).result(timeout=60))
            except Exception as error:  # What would reach user code.
                errors.append(("publish", repr(error)))
            number += 1

    threads = [threading.Thread(target=publish) for _ in range(PUBLISHERS)]
    for thread in threads:
        thread.start()
    try:
        for node in cluster.nodes:
            more(confirmed)
            assert node.stop() == 0
            more(confirmed)
            node.start()
            wait_until(node.is_ready, what="the node")
        more(confirmed)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    wait_until(lambda: confirmed <= acked, 60, "every confirmed message")
    with lock:
        print(f"{len(confirmed)} confirmed, {delivered} delivered, {delivered - len(acked)} duplicates, {errors}")
    assert not errors
    assert not again, f"{len(again)} messages came after their confirmed ack"
    assert box.future.running()


def more(confirmed):
    wanted = len(confirmed) + PHASE
    wait_until(lambda: len(confirmed) >= wanted, 60, "publishing")
