"""A feature: the log-prob of the token minus that of the most likely other token. Negative where another token was
likelier."""

from rollmesh.trainer.features import Feature


class Margin(Feature):
    by_token = True

    def __call__(self, inputs):
        logprobs = inputs.logits.log_softmax(-1)
        others = logprobs.scatter(-1, inputs.token_ids[:, None], float("-inf"))
        return inputs.logprobs - others.max(-1).values
