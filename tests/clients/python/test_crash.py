"""The server is killed in the middle of everything; the client goes on by itself."""

import threading
import time


def test_nothing_is_lost_when_the_server_is_killed(own_server, own_clients, inbox):
    topic, name = own_clients.pair(enable_exactly_once_delivery=True)
    confirmed, stop, lock = set(), threading.Event(), threading.Lock()
    acked, again = set(), []

    def handle(message):
        with lock:
            if message.message_id in acked:
                again.append(message.message_id)
        result = message.ack_with_response()

        def done(future):
            if future.exception() is None:
                with lock:
                    acked.add(message.message_id)

        result.add_done_callback(done)

    box = inbox(own_clients, name, handle)

    def publish():
        number = 0
        while not stop.is_set():
            future = own_clients.publisher.publish(topic, str(number).encode())
            number += 1
            # Waits through the outage: the client retries by itself.
            confirmed.add(future.result(timeout=60))

    threads = [threading.Thread(target=publish) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        before = len(confirmed)
        while len(confirmed) < before + 200:
            time.sleep(0.01)
        own_server.kill()
        own_server.start()
    before = len(confirmed)
    while len(confirmed) < before + 200:
        time.sleep(0.01)
    stop.set()
    for thread in threads:
        thread.join()
    deadline = time.monotonic() + 60
    while not confirmed <= acked and time.monotonic() < deadline:
        time.sleep(0.05)
    assert confirmed <= acked, f"{len(confirmed - acked)} confirmed messages never came"
    assert not again, f"{len(again)} messages came after their confirmed ack"
    assert box.future.running()
