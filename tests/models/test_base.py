import pytest
import torch

import capsroute

LOGITS = torch.tensor([[-1.0, 2.0, 0.5], [-3.0, -1.0, -2.0]])


@pytest.mark.parametrize(
    ("multilabel", "answer"),
    [(False, [[0, 1, 0], [0, 1, 0]]), (True, [[0, 1, 1], [0, 0, 0]])],
)
def test_the_answer_is_one_class_or_a_set_that_may_be_empty(multilabel, answer):
    model = capsroute.create_model(
        "inverted_small_multimnist", num_classes=3, multilabel=multilabel
    )
    decided = model.decide(LOGITS)
    assert decided.dtype == torch.bool and decided.tolist() == answer


def test_lengths_are_probabilities_already():
    model = capsroute.create_model("dynamic_vector_multimnist", num_classes=3)
    assert model.decide(torch.tensor([[0.4, 0.6, 0.9]])).tolist() == [[False, True, True]]
