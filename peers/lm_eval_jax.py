"""Our models for EleutherAI's lm-eval, where it is installed (pip install lm_eval): every task that it knows.

$ python peers/lm_eval_jax.py run --model jax --model_args source=out-mine --device cpu --tasks arc_easy --batch_size 16
"""
import sys
from pathlib import Path

from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

sys.path.insert(0, str(Path(__file__).parent.parent))
from jax_text import load


@register_model('jax')
class JaxLM(LM):
    """A TextModel. The arguments are load's, and max_length and batch_size of score."""

    def __init__(self, source, batch_size=16, max_length=0, max_batch_size=None, **options):
        super().__init__()
        options = {name: value for name, value in options.items() if value is not None}
        self.model = load(source, **options)
        self.options = dict(batch_size=int(batch_size), max_length=int(max_length))

    def loglikelihood(self, requests):
        """[(log-probability of the continuation, whether it is greedy)]; choices after a context share its cache."""
        items = {}
        for request in requests:
            context, continuation = request.args
            items.setdefault(context, []).append(self.model.encode_pair(context, continuation))
        scores = {context: iter(rows) for context, rows in
                  zip(items, self.model.score(list(items.values()), **self.options))}
        found = [next(scores[request.args[0]]) for request in requests]
        return [(float(logprobs.sum()), bool(likeliest.all())) for logprobs, likeliest in found]

    def loglikelihood_rolling(self, requests):
        """The log-probability of each text."""
        texts = [request.args[0] for request in requests]
        return [float(logprobs.sum()) for _, logprobs in self.model.logprobs(texts, **self.options)]

    def generate_until(self, requests):
        """What follows each context, up to one of the texts of `until`; contexts with equal options share batches."""
        groups, texts = {}, {}
        for i, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(i)
        for group in groups.values():
            options = requests[group[0]].args[1]
            sampling = dict(stop=options.get('until') or (), max_new_tokens=options.get('max_gen_toks', 256),
                            temperature=options.get('temperature', 0) if options.get('do_sample') else 0)
            while chosen := group[:self.options['batch_size']]:
                del group[:len(chosen)]
                found = self.model.generate([requests[i].args[0] for i in chosen], **sampling)
                for i, text in zip(chosen, found):
                    texts[i] = text[len(self.model.tokenizer.decode(self.model.encode(requests[i].args[0]))):]
        return [texts[i] for i in range(len(requests))]


if __name__ == '__main__':
    from lm_eval.__main__ import cli_evaluate
    cli_evaluate()
