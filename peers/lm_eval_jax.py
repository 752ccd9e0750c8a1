"""Our models for EleutherAI's lm-eval, where it is installed (pip install lm_eval): every task that it knows.

$ python peers/lm_eval_jax.py run --model jax --model_args source=out-mine --device cpu --tasks arc_easy --batch_size 16
"""
import collections
import json
import sys
from pathlib import Path

from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs

sys.path.insert(0, str(Path(__file__).parent.parent))
from jax_flags import CONTROLS, TextSampling, UserError
from jax_text import Generation, load


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
        """What follows each context, up to one of the texts of `until`; contexts with equal options share batches.

        A request that comes several times, as pass@k and majority votes have it, gets another sample each time."""
        repeats = collections.Counter()
        groups = {}
        for i, request in enumerate(requests):
            context, options = request.args
            key = json.dumps(options, sort_keys=True, default=str)
            number = repeats[context, key]
            repeats[context, key] += 1
            groups.setdefault((key, number), []).append(i)

        answers = {}
        for (_, number), group in groups.items():
            sampling = self.read_options(requests[group[0]].args[1])
            for start in range(0, len(group), self.options['batch_size']):
                chosen = group[start:start + self.options['batch_size']]
                prompts = [self.encode(requests[i].args[0]) for i in chosen]
                generation = Generation(self.model, prompts, sampling, first_sample=number).finish()
                for i, prompt, text in zip(chosen, generation.prompt_texts, generation.texts):
                    answers[i] = text[len(prompt):]
        return [answers[i] for i in range(len(requests))]

    @staticmethod
    def read_options(options):
        """A TextSampling of the options of a task; an option that would be without effect is refused."""
        options = dict(normalize_gen_kwargs(options))
        if not options.pop('do_sample'):
            options['temperature'] = 0
        options.setdefault('temperature', 1.0)
        controls = {name: options.pop(name) for name in CONTROLS if name in options}
        sampling = TextSampling(
            stop=tuple(options.pop('until')), max_new_tokens=options.pop('max_gen_toks'), **controls)
        if options:
            raise UserError(f'the task samples with {options}, which is not supported')
        return sampling

    def encode(self, context):
        """The token ids of a context; one that a chat template has begun gets no second token that begins a text."""
        tokenizer = self.model.tokenizer
        has_start = tokenizer.start_text is not None and context.startswith(tokenizer.start_text)
        return tokenizer.encode(context, not has_start)

    # what --apply_chat_template needs

    @property
    def tokenizer_name(self):
        return self.model.title.replace('/', '__')

    def chat_template(self, chat_template=False):
        return str(self.model.tokenizer.chat_template or '')

    def apply_chat_template(self, chat_history, add_generation_prompt=True):
        """The messages as a text; without add_generation_prompt it ends with the last message, to be continued."""
        tokenizer = self.model.tokenizer
        text = tokenizer.render_chat(chat_history, add_generation_prompt=add_generation_prompt)
        if add_generation_prompt:
            return text
        last = chat_history[-1]['content']
        return text[:text.rindex(last) + len(last)]


if __name__ == '__main__':
    from lm_eval.__main__ import cli_evaluate
    cli_evaluate()
