"""Working memory that steps on a CPU take and release."""

from __future__ import annotations

import threading

import torch

from eventful.memory.state import RowState
from eventful.ops.scratch import _MOST_FREE, TemporaryBuffers, _free_buffers

LIKE = torch.zeros(1)


def test_a_buffer_has_one_user_until_it_is_released():
    first, second = TemporaryBuffers(), TemporaryBuffers()
    one = first.take((40, 10), LIKE).fill_(1)
    other = second.take((40, 10), LIKE).fill_(2)
    another = first.take((40, 10), LIKE).fill_(3)
    assert [float(x.mean()) for x in (one, other, another)] == [1, 2, 3]
    second.release()
    again = first.take((20, 10), LIKE)
    assert again.data_ptr() == other.data_ptr()
    assert float(one.mean()) == 1
    first.release()


def test_buffers_have_the_dtype_asked_for_and_few_are_kept():
    buffers = TemporaryBuffers()
    for rows in range(1, 30):
        buffers.take((rows, 1000), LIKE)
    buffers.release()
    kept = [buffer.numel() for buffer in _free_buffers()]
    assert len(kept) <= _MOST_FREE
    assert max(kept) >= 29_000
    assert buffers.take((5, 5), LIKE.bfloat16()).dtype == torch.bfloat16
    buffers.release()


def test_buffers_go_to_the_thread_that_releases_them():
    buffers = TemporaryBuffers()
    address = buffers.take((3, 123_457), LIKE).data_ptr()
    found = []

    def end() -> None:
        buffers.release()
        found.append(TemporaryBuffers().take((3, 123_457), LIKE).data_ptr())

    thread = threading.Thread(target=end)
    thread.start()
    thread.join()
    assert found == [address]


def test_two_states_undo_what_each_has_written():
    states = [RowState(1), RowState(1)]
    changed = torch.rand(1, 50) < 0.5
    with torch.inference_mode():
        before = [torch.randn(1, 50, 8) for _ in states]
        for state, value in zip(states, before, strict=True):
            state.fill("map", value)
            state.begin()
            state.open_where("map", changed, 8, value)[changed] = 7
        for state, value in zip(states, before, strict=True):
            assert (state["map"][changed] == 7).all()
            state.rollback()
            assert torch.equal(state["map"], value)
