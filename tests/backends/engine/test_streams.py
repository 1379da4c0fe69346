import pytest
import torch

from backends.engine.streams import Copy, DeferredStreams, make_streams


@pytest.fixture
def streams():
    return DeferredStreams()


def test_the_cpu_puts_copies_off(streams):
    assert isinstance(make_streams(torch.device("cpu")), DeferredStreams)
    target, source = torch.zeros(4), torch.arange(4.0)
    event = streams.copy("up", [Copy(target, source)], [])
    assert target.tolist() == [0, 0, 0, 0]
    assert streams.copied_bytes == {"up": 0, "down": 0}
    streams.wait(event)
    assert target.tolist() == [0, 1, 2, 3]
    assert streams.copied_bytes == {"up": 16, "down": 0}
    source.zero_()
    streams.wait(event)  # once is enough
    assert target.tolist() == [0, 1, 2, 3]


def test_a_copy_reads_its_source_when_it_is_waited_for(streams):
    target, source = torch.zeros(1), torch.ones(1)
    event = streams.copy("down", [Copy(target, source)], [])
    source.fill_(5)
    streams.wait(event)
    assert target.item() == 5


def test_earlier_copies_of_a_direction_go_first_and_later_ones_stay(streams):
    targets = [torch.zeros(1) for _ in range(4)]
    ones = torch.ones(1)
    streams.copy("up", [Copy(targets[0], ones)], [])
    event = streams.copy("up", [Copy(targets[1], ones)], [])
    streams.copy("up", [Copy(targets[2], ones)], [])
    streams.copy("down", [Copy(targets[3], ones)], [])
    streams.wait(event)
    assert [target.item() for target in targets] == [1, 1, 0, 0]
    streams.drain()
    assert [target.item() for target in targets] == [1, 1, 1, 1]


def test_a_copy_waits_for_a_copy_of_the_other_direction(streams):
    device, host, slot = torch.ones(1), torch.zeros(1), torch.zeros(1)
    down = streams.copy("down", [Copy(host, device)], [streams.mark()])
    up = streams.copy("up", [Copy(slot, host)], [down])
    streams.wait(up)
    assert slot.item() == 1


def test_without_that_wait_it_reads_what_was_there(streams):
    device, host, slot = torch.ones(1), torch.zeros(1), torch.full((1,), 9.0)
    streams.copy("down", [Copy(host, device)], [streams.mark()])
    streams.wait(streams.copy("up", [Copy(slot, host)], []))
    assert slot.item() == 0


def test_wiping_comes_at_once(streams):
    slot = torch.ones(3)
    event = streams.copy("up", [Copy(slot[:2], torch.zeros(2))], [], wipe=slot)
    assert slot.isnan().all()
    streams.wait(event)
    assert slot[:2].tolist() == [0, 0]
    assert slot[2].isnan()


def test_synchronised_streams_copy_at_once():
    streams = make_streams(torch.device("cpu"), synchronise=True)
    target, source = torch.zeros(2), torch.ones(2)
    event = streams.copy("up", [Copy(target, source)], [])
    assert target.tolist() == [1, 1]
    assert streams.copied_bytes == {"up": 8, "down": 0}
    source.fill_(5)
    streams.wait(event)
    assert target.tolist() == [1, 1]
