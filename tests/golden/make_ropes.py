"""Writes ropes.json beside it: for every config of rope_cases.py, how RoPE rotates in transformers.
Run by hand; needs torch and transformers:

    python tests/golden/make_ropes.py

{'results': [result], 'families': {model_type: [index of the result of each case]}}. A result is
null where transformers raises, else for each type of layer [kind, inverse frequencies, factor of
cosine and sine], and the factor of the scores."""

import importlib
import json
import sys
import warnings
from pathlib import Path

import torch
import transformers
from transformers import CONFIG_MAPPING

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from rope_cases import BASES, cases, config_of  # noqa: E402


def rotary_class(family):
    """The module of transformers that computes the angles of a family."""
    folder = {'gemma3_text': 'gemma3', 'llama4_text': 'llama4'}.get(family, family)
    module = importlib.import_module(f'transformers.models.{folder}.modeling_{folder}')
    names = [
        name for name in vars(module) if name.endswith('RotaryEmbedding') and 'Vision' not in name
    ]
    return module, getattr(module, names[0])


def rotation(family, values):
    """What transformers makes of a config.json."""
    config = CONFIG_MAPPING[family].from_dict(
        json.loads(json.dumps(values))
    )  # no object twice, as in a file
    module, rotary = rotary_class(family)
    embedding = rotary(config)
    width = (
        config.head_dim
        if getattr(config, 'head_dim', None)
        else config.hidden_size // config.num_attention_heads
    )
    types = sorted(set(config.layer_types)) if family in ('olmo3', 'gemma3_text') else [None]
    result = {}
    for layer_type in types:
        start = f'{layer_type}_' if layer_type else ''
        kind = embedding.rope_type[layer_type] if layer_type else embedding.rope_type
        inv_freq = getattr(embedding, f'{start}inv_freq')
        # a call, which may fail: within the length of pretraining
        position = torch.arange(4)[None]
        embedding(torch.zeros(1, 4, width), position, *([layer_type] if layer_type else []))
        if family != 'phi3' and 2 * len(inv_freq) != width:
            raise ValueError(
                'attention fails: it multiplies cosines of a part of the head with all of it'
            )
        result[layer_type or 'full_attention'] = [
            kind,
            inv_freq.double().tolist(),
            float(getattr(embedding, f'{start}attention_scaling')),
        ]
    scores = 1.0
    if family == 'deepseek_v3':
        scores = float(module.yarn_apply_mscale(config.rope_parameters, 1.0))
    if not all(
        torch.isfinite(torch.tensor(frequencies)).all() for _, frequencies, _ in result.values()
    ):
        raise ValueError('not finite')
    return {'layers': result, 'scores': scores}


def main():
    warnings.simplefilter('ignore')
    transformers.logging.set_verbosity(50)
    results, families = [], {}
    index_of = {}
    for family in BASES:
        indices = []
        for case in cases(family):
            try:
                result = rotation(family, config_of(family, case))
            except Exception:  # any of its own, of torch and of Python
                result = None
            text = json.dumps(result)
            text = json.dumps(json.loads(text, parse_float=lambda x: float(f'{float(x):.7g}')))
            if text not in index_of:
                index_of[text] = len(results)
                results.append(json.loads(text))
            indices.append(index_of[text])
        families[family] = indices
        raised = sum(results[i] is None for i in indices)
        print(f'{family}: {len(indices)} cases, {raised} of which raise')
    lines = ',\n'.join(json.dumps(result) for result in results)
    rows = ',\n'.join(
        f'{json.dumps(name)}: {json.dumps(row, separators=(",", ":"))}'
        for name, row in families.items()
    )
    (HERE / 'ropes.json').write_text(f'{{"results": [\n{lines}],\n"families": {{\n{rows}}}}}\n')


if __name__ == '__main__':
    main()
