"""Writes scores.json beside it: what lm-eval scores of a model whose tokenizer puts tokens around each text. Run by
hand; needs transformers, torch and lm_eval:

    python tests/golden/make_scores.py

The model is families/llama with the vocabulary of tests/golden/letters. lm-eval would score an end
token that is put behind a text, and would take it for the first token of the continuation: it gets the tokenizer
without that.
"""
import json
import shutil
import tempfile
import types
from pathlib import Path

from lm_eval.models.huggingface import HFLM
from tokenizers import AddedToken, Tokenizer, decoders, models, processors

HERE = Path(__file__).parent
PAIRS = [['the cat', ' sat'], ['the cat ', 'sat on'], ['', 'the cat'], ['<s>the', ' cat'], ['a', 'b'],
         ['', '<s>the'], ['hello, ', ' again.']]
TEXTS = ['the cat sat.', 'hello, again.']
PROCESSORS = {  # what is put around a text: (as lm-eval gets it, as the test has it)
    'begin and end': ('<s> $0', '<s> $0 </s>'), 'end': ('$0', '$0 </s>'), 'begin': ('<s> $0', '<s> $0'),
    'nothing': ('$0', '$0')}


def write_model(folder, single):
    """Writes the model with a tokenizer that puts around each text what `single` says."""
    shutil.copytree(HERE / 'families' / 'llama', folder)
    vocab = {c: i for i, c in enumerate('abcdefghijklmnopqrstuvwxyz ,.!?:ABCD')}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token=None))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token) for token in ('<s>', '</s>', '<user>', '<model>')])
    ends = [(token, tokenizer.token_to_id(token)) for token in ('<s>', '</s>')]
    tokenizer.post_processor = processors.TemplateProcessing(single, special_tokens=ends)
    tokenizer.save(str(folder / 'tokenizer.json'))
    (folder / 'tokenizer_config.json').write_text(json.dumps({'bos_token': '<s>', 'eos_token': '</s>'}))


def requests(*args):
    return [types.SimpleNamespace(args=each) for each in args]


def rows_of(lm, context, continuation):
    """(ids, number of them before the continuation) as in HFLM.loglikelihood."""
    if context:
        before, after = lm._encode_pair(context, continuation)
    else:
        after = lm.tok_encode(continuation, add_special_tokens=False)
        before = [lm.prefix_token_id]
        if after[0] == lm.prefix_token_id:
            before, after = after[:1], after[1:]
    return before + after, len(before)


found = {}
for name, (theirs, ours) in PROCESSORS.items():
    with tempfile.TemporaryDirectory() as made:
        write_model(Path(made, 'model'), theirs)
        options = dict(pretrained=str(Path(made, 'model')), device='cpu', dtype='float32', batch_size=1,
                       logits_cache=False)  # it takes two requests with the same tokens for one
        lm = HFLM(**options)
        scores = lm.loglikelihood(requests(*PAIRS), disable_tqdm=True)
        rolling = HFLM(**options, add_bos_token=False).loglikelihood_rolling(
            requests(*[[text] for text in TEXTS]), disable_tqdm=True)
        found[name] = {'single': ours, 'rows': [rows_of(lm, *pair) for pair in PAIRS],
                       'scores': [score for score, _ in scores], 'rolling': rolling}
(HERE / 'scores.json').write_text(json.dumps({'pairs': PAIRS, 'texts': TEXTS, 'cases': found}) + '\n')
