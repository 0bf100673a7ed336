"""Tables sent to the device: filled up, cast, at places that their shape decides."""

import numpy as np
import torch

from hf_aspire.staging import UNDER_WAY, Part, Staging


def test_tables_arrive_filled_up_at_places_that_stay():
    staging = Staging(64, torch.device("cpu"))
    first = [
        Part(np.array([[1, 2, 3]]), 3, [7, 8, 9]),
        Part(np.zeros(0, dtype=np.int32), 2, -1),
        Part(np.array([4, 5]), 2, 0),
        Part(np.zeros(0, dtype=np.int32), 0, -1),
    ]
    tables = staging.send("wide", first)
    assert [table.tolist() for table in tables] == [[[1, 2, 3], [7, 8, 9], [7, 8, 9]], [-1, -1], [4, 5], []]
    assert all(table.dtype == torch.int32 and table.data_ptr() % 16 == 0 for table in tables)
    other = staging.send("narrow", [Part(np.array([6]), 2, -1)])
    assert other[0].tolist() == [6, -1]
    again = staging.send("wide", [Part(np.full((2, 3), 5), 3, 1), *first[1:]])
    assert [table.data_ptr() for table in again] == [table.data_ptr() for table in tables]
    assert again[0].tolist() == [[5, 5, 5], [5, 5, 5], [1, 1, 1]] and again[2].tolist() == [4, 5]


def test_tables_under_way_are_not_overwritten():
    """As many as may be under way are sent while a GPU is busy with something else."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    staging = Staging(64, device)
    if device.type == "cuda":
        torch.cuda._sleep(10**8)  # cycles
    sent = [staging.send("shape", [Part(np.full(3, step), 4, -1)])[0].clone() for step in range(UNDER_WAY)]
    assert [table.tolist() for table in sent] == [[step] * 3 + [-1] for step in range(UNDER_WAY)]
