"""The embedding verb of every method."""

import pytest
import torch

from polydecode.methods import method_names
from tiny import batch_of, random_rows, tiny_base, tiny_model


@pytest.mark.parametrize("name", method_names())
def test_an_embedding_is_the_mean_over_real_tokens_only(name):
    """Pins: padding in the mean, or a row's embedding depending on its neighbours."""
    model = tiny_model(name, tiny_base())
    rows = random_rows([4, 9, 6])
    together = model.embed(batch_of(rows, [[1]] * 3))
    assert together.shape == (3, model.config.hidden_size)
    for b, row in enumerate(rows):
        alone = batch_of([row], [[1]])
        torch.testing.assert_close(together[b], model.embed(alone)[0], atol=1e-5, rtol=0)
        torch.testing.assert_close(together[b], model.hidden(alone)[0].float().mean(0), atol=1e-5, rtol=0)
