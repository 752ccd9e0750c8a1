"""Files of weights: what is damaged or malicious is refused."""
import fnmatch
import json
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from jax_hub.folders import kept_config_json
from jax_hub.torch_files import read_torch_checkpoint
from jax_hub.weights import ScaledBlocks
from jax_pretrained import load_pretrained
from tests.common import FAMILIES, GOLDEN, ROOT, copy_folder, edit_json, edit_tensors, refusal


def edit_zip(path, edit):
    """Replaces each record of a zip file by edit(name without the folder, content)."""
    with zipfile.ZipFile(path) as archive:
        records = {name: edit(name.split('/', 1)[1], archive.read(name)) for name in archive.namelist()}
    write_zip(path, records)


def write_zip(path, records):
    with zipfile.ZipFile(path, 'w') as archive:
        for name, content in records.items():
            archive.writestr(name, content)
    return path


# -----------------------------------------------------------------------------
# what is read is right

def test_torch_checkpoint_of_every_dtype_and_stride():
    checkpoint, expected = read_torch_checkpoint(GOLDEN / 'tensors.pt'), np.load(GOLDEN / 'tensors.npz')
    assert checkpoint['shape'] == (4, 6)
    assert checkpoint['nested'] == [1, 2.5, None, ('a', True)]
    tensors = checkpoint['tensors']
    assert set(tensors) == set(expected)
    assert tensors['bfloat16'].dtype == jnp.bfloat16
    for name, x in tensors.items():
        if name == 'bfloat16':
            x = x.astype(np.float32)  # the .npz has no bfloat16
        np.testing.assert_array_equal(x, expected[name], strict=True)
    assert np.shares_memory(tensors['transposed'], tensors['sliced'])


def test_blocks_of_float8_may_have_other_heights_than_widths_and_be_cut_at_the_edges():
    weight = np.ones((5, 7), ml_dtypes.float8_e4m3fn)
    scale = np.arange(1, 10, dtype=np.float32).reshape(3, 3)
    expected = scale.repeat(2, axis=0).repeat(3, axis=1)[:5, :7]
    np.testing.assert_array_equal(ScaledBlocks(weight, scale, (2, 3))[:], expected)


def shard_bin(folder):
    """Splits the pytorch_model.bin of a folder into two files with an index, as older versions of transformers did."""
    whole = read_torch_checkpoint(folder / 'pytorch_model.bin')
    names = ['pytorch_model-00001-of-00002.bin', 'pytorch_model-00002-of-00002.bin']
    weight_map = {name: names[i % 2] for i, name in enumerate(whole)}
    for file in names:
        tensors = {name: x for name, x in whole.items() if weight_map[name] == file}
        write_torch_file(folder / file, tensors)
    (folder / 'pytorch_model.bin').unlink()
    index = {'metadata': {}, 'weight_map': weight_map}
    (folder / 'pytorch_model.bin.index.json').write_text(json.dumps(index))


def write_torch_file(path, tensors):
    """What torch.save writes for a dict of float32 arrays."""
    body, records = b'\x80\x02}(', {}
    for i, (name, x) in enumerate(tensors.items()):
        x = np.ascontiguousarray(x, np.float32)
        strides = tuple(step // 4 for step in x.strides)
        storage = (b'(' + opcodes('storage') + b'ctorch\nFloatStorage\n' + opcodes(str(i)) + opcodes('cpu')
                   + opcodes(x.size) + b'tQ')
        body += opcodes(name) + tensor_pickle(size=x.shape, stride=strides, inner=storage)[2:-1]
        records[f'archive/data/{i}'] = x.tobytes()
    write_zip(path, {'archive/data.pkl': body + b'u.'} | records)


def test_shards_of_pytorch_model_bin_are_read(tmp_path):
    folder = copy_folder(GOLDEN / 'hf_bin', tmp_path)
    shard_bin(folder)
    config, params = load_pretrained(folder)
    want_config, want = load_pretrained(GOLDEN / 'hf_bin')
    assert config == want_config
    jax.tree.map(np.testing.assert_array_equal, params, want)
    (folder / 'pytorch_model-00002-of-00002.bin').unlink()
    assert 'names pytorch_model-00002-of-00002.bin' in refusal(load_pretrained, folder)


def test_weights_in_e5m2_are_read(tmp_path):
    folder = copy_folder(GOLDEN / 'hf', tmp_path)
    stored = load_file(folder / 'model.safetensors')
    tensors = {name: np.asarray(x).astype(ml_dtypes.float8_e5m2) for name, x in stored.items()}
    edit_tensors(folder, tensors)
    params = load_pretrained(folder)[1]
    want = tensors['transformer.wte.weight'].astype(np.float32)
    np.testing.assert_array_equal(params['wte'], want)


# -----------------------------------------------------------------------------
# what cannot be read is refused with one line

@pytest.mark.parametrize('path', [
    'hf/model.safetensors', 'hf_sharded/model-00002-of-00003.safetensors', 'hf_sharded/model.safetensors.index.json',
    'hf_bin/pytorch_model.bin', 'nanogpt/ckpt.pt'])
@pytest.mark.parametrize('keep', [0, 3, 0.5, 0.999])
def test_a_truncated_file_is_refused(path, keep, tmp_path):
    folder = copy_folder((GOLDEN / path).parent, tmp_path)
    content = (tmp_path / path).read_bytes()
    n_bytes = int(keep * len(content)) if 0 < keep < 1 else keep
    (tmp_path / path).write_bytes(content[:n_bytes])
    assert Path(path).name in refusal(load_pretrained, folder)


def test_a_flipped_bit_in_a_ckpt_is_refused(tmp_path):
    path = copy_folder(GOLDEN / 'nanogpt', tmp_path) / 'ckpt.pt'
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert 'damaged' in refusal(load_pretrained, path)


def test_a_shard_that_is_not_there_is_named(tmp_path):
    folder = copy_folder(GOLDEN / 'hf_sharded', tmp_path)
    (folder / 'model-00002-of-00003.safetensors').unlink()
    assert 'names model-00002-of-00003.safetensors' in refusal(load_pretrained, folder)


@pytest.mark.parametrize('name', ['model.safetensors', 'config.json'])
def test_a_link_out_of_the_folder_is_no_file_of_a_model(name, tmp_path):
    folder = copy_folder(GOLDEN / 'hf', tmp_path)
    (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    assert f'{name} is not read: it leads out of its folder' in refusal(load_pretrained, folder)


def test_a_link_out_of_a_run_is_no_config_json_that_it_keeps(tmp_path):
    (tmp_path / 'out' / 'tokenizer').mkdir(parents=True)
    (tmp_path / 'out' / 'tokenizer' / 'config.json').symlink_to('/etc/passwd')
    assert 'config.json is not read: it leads out of its folder' in refusal(kept_config_json, tmp_path / 'out')


@pytest.mark.parametrize('name', ['../model.safetensors', '{}/model.safetensors'])
def test_a_shard_outside_of_the_folder_is_refused(name, tmp_path):
    copy_folder(GOLDEN / 'hf', tmp_path)
    folder = copy_folder(GOLDEN / 'hf_sharded', tmp_path)
    outside = f'../hf/{Path(name).name}' if name.startswith('..') else name.format(tmp_path / 'hf')
    edit_json(folder / 'model.safetensors.index.json', weight_map={'wte.weight': outside})
    assert 'leads out of its folder' in refusal(load_pretrained, folder)


def test_a_snapshot_in_hugging_faces_cache_is_read(tmp_path):
    blobs, snapshot = tmp_path / 'models--me--mine' / 'blobs', tmp_path / 'models--me--mine' / 'snapshots' / '01'
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in (GOLDEN / 'hf_sharded').iterdir():
        shutil.copyfile(path, blobs / f'blob-{path.name}')
        (snapshot / path.name).symlink_to(f'../../blobs/blob-{path.name}')
    assert load_pretrained(snapshot)[0] == load_pretrained(GOLDEN / 'hf_sharded')[0]


@pytest.mark.parametrize('dtype', ['uint16', 'uint32', 'uint64', 'float8_e4m3fn'])
def test_a_tensor_of_a_type_that_is_no_weights_is_named_with_it(dtype, tmp_path):
    folder = copy_folder(GOLDEN / 'hf', tmp_path)
    wte = np.asarray(load_file(folder / 'model.safetensors')['transformer.wte.weight'])
    edit_tensors(folder, {'transformer.wte.weight': wte.astype(getattr(ml_dtypes, dtype, dtype))})
    message = refusal(load_pretrained, folder)
    assert f'wte.weight is {dtype}' in message and 'damaged' not in message


def test_a_tensor_of_a_type_that_cannot_be_read_is_named_with_it(tmp_path):
    header = json.dumps({'wte.weight': {'dtype': 'F4', 'shape': [4], 'data_offsets': [0, 2]}}).encode()
    header += b' ' * (-len(header) % 8)
    folder = copy_folder(GOLDEN / 'hf', tmp_path)
    (folder / 'model.safetensors').write_bytes(len(header).to_bytes(8, 'little') + header + bytes(2))
    assert 'wte.weight is of the type F4, which cannot be read' in refusal(load_pretrained, folder)


def test_a_folder_that_mlx_has_quantized_is_called_so(tmp_path):
    folder = copy_folder(FAMILIES / 'llama', tmp_path)
    name = 'model.layers.0.self_attn.q_proj'
    scales = np.ones((32, 1), np.float16)
    packed = np.zeros((32, 4), np.uint32)
    edit_tensors(folder, {f'{name}.weight': packed, f'{name}.scales': scales, f'{name}.biases': scales})
    message = refusal(load_pretrained, folder)
    assert 'is quantized by MLX' in message and 'mlx_lm.convert --dequantize' in message


def test_a_pytorch_model_bin_of_something_else_is_refused(tmp_path):
    folder = copy_folder(GOLDEN / 'hf_bin', tmp_path)
    for content in ([], {3: 4}, {'wte.weight': 'text'}, 7):
        write_zip(folder / 'pytorch_model.bin', {'archive/data.pkl': pickle.dumps(content, 2)})
        assert 'does not hold a state dict' in refusal(load_pretrained, folder)


@pytest.mark.parametrize('index', ['{}', '[]', '{"weight_map": 3}', '{"weight_map": {"wte.weight": 3}}'])
def test_an_index_without_a_map_is_refused(index, tmp_path):
    folder = copy_folder(GOLDEN / 'hf_sharded', tmp_path)
    (folder / 'model.safetensors.index.json').write_text(index)
    assert 'index.json' in refusal(load_pretrained, folder)


def test_a_missing_network_is_reported_in_one_line(tmp_path):
    code = 'import jax_pretrained as p\ntry: p.load_pretrained("gpt2-medium")\nexcept p.UserError as e: print(e)'
    env = os.environ | {'HF_HUB_OFFLINE': '1', 'HF_HOME': str(tmp_path), 'JAX_PLATFORMS': 'cpu'}
    run = subprocess.run([sys.executable, '-c', code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert run.stderr == ''
    assert run.stdout.count('\n') == 1
    for part in ('config.json', 'model.safetensors', 'openai-community/gpt2-medium'):
        assert part in run.stdout


@pytest.mark.parametrize('cached', [(), ('config.json',)])
@pytest.mark.parametrize('name', ['hf', 'hf_bin'])
def test_weights_of_torch_are_downloaded_where_there_are_no_safetensors(name, cached, tmp_path, monkeypatch):
    """A hub that is a folder, in place of the network."""
    import huggingface_hub
    calls = []

    def snapshot_download(repo, allow_patterns, local_files_only=False):
        calls.append(local_files_only)
        for path in (GOLDEN / name).iterdir():
            if not local_files_only and any(fnmatch.fnmatch(path.name, pattern) for pattern in allow_patterns):
                shutil.copyfile(path, tmp_path / path.name)
        if not os.listdir(tmp_path):
            raise FileNotFoundError
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, 'snapshot_download', snapshot_download)
    for file in cached:
        shutil.copyfile(GOLDEN / name / file, tmp_path / file)
    assert load_pretrained('me/mine')[0] == load_pretrained(GOLDEN / name)[0]
    calls.clear()
    load_pretrained('me/mine')
    assert calls == [True]  # what is in the cache asks for no network


# -----------------------------------------------------------------------------
# the restricted reader of torch.save files

def opcodes(value):
    """The part of a pickle that pushes `value`."""
    return pickle.dumps(value, 2)[2:-1]


def tensor_pickle(storage=b'ctorch\nFloatStorage\n', count=6, offset=0, size=(2, 3), stride=(3, 1), inner=None):
    """What torch.save writes for one tensor. inner: opcodes instead of its storage."""
    if inner is None:
        inner = b'(' + opcodes('storage') + storage + opcodes('0') + opcodes('cpu') + opcodes(count) + b'tQ'
    view = opcodes(offset) + opcodes(size) + opcodes(stride)
    return b'\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(' + inner + view + b'\x89ccollections\nOrderedDict\n)RtR.'


def torch_file(tmp_path, data_pkl, **records):
    data = np.arange(6, dtype=np.float32).tobytes()
    return write_zip(tmp_path / 'ckpt.pt', {'archive/data.pkl': data_pkl, 'archive/data/0': data} | records)


class Call:
    """An object whose pickle calls `function` when it is loaded."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize('protocol', [0, 2, 4])
@pytest.mark.parametrize('function, text', [
    (os.system, 'touch {}'), (eval, 'open({!r}, "w")'), (exec, 'open({!r}, "w")')])
@pytest.mark.parametrize('container', ['torch', 'bare'])
def test_a_malicious_checkpoint_is_refused_and_not_executed(protocol, function, text, container, tmp_path):
    trace = tmp_path / 'executed'
    evil = pickle.dumps({'model': Call(function, text.format(str(trace))), 'model_args': {}}, protocol)
    path = torch_file(tmp_path, evil)
    if container == 'bare':
        path.write_bytes(evil)
    message = refusal(load_pretrained, path)
    if (container, protocol) != ('bare', 0):
        assert 'was not loaded' in message
    assert not trace.exists()
    pickle.loads(evil)  # an ordinary unpickler does execute it
    assert trace.exists()


@pytest.mark.parametrize('module, name', [
    ('torch', 'load'), ('torch.serialization', 'load'), ('torch._utils', '_import_dotted_name'),
    ('torch', 'FloatTensor'), ('collections', 'namedtuple'), ('builtins', 'getattr'), ('os', 'system'),
    ('numpy', 'load'), ('collections', 'OrderedDict.fromkeys'), ('torch', 'Size.__class__'),
    ('torch', '_utils._rebuild_tensor_v2'),
    ('torch._utils', '_rebuild_tensor_v2.__func__.__globals__'), ('torch', 'FloatStorage.format'),
    ('jax_pretrained', 'os.system'), ('jax_pretrained', 'TorchUnpickler')])
def test_only_the_exact_names_that_tensors_need_are_known(module, name, tmp_path):
    push = lambda text: b'\x8c' + bytes([len(text)]) + text.encode()
    path = torch_file(tmp_path, b'\x80\x04' + push(module) + push(name) + b'\x93.')  # STACK_GLOBAL follows dots
    assert f'{module}.{name}' in refusal(read_torch_checkpoint, path)
    if '.' not in name:
        path = torch_file(tmp_path, f'c{module}\n{name}\n.'.encode())
        assert f'{module}.{name}' in refusal(read_torch_checkpoint, path)


def test_big_endian_storages_are_read(tmp_path):
    np.testing.assert_array_equal(read_torch_checkpoint(torch_file(tmp_path, tensor_pickle())), [[0, 1, 2], [3, 4, 5]])
    data = np.arange(6, dtype='>f4').tobytes()
    path = torch_file(tmp_path, tensor_pickle(), **{'archive/byteorder': 'big', 'archive/data/0': data})
    np.testing.assert_array_equal(read_torch_checkpoint(path), [[0, 1, 2], [3, 4, 5]])


@pytest.mark.parametrize('content', [
    tensor_pickle(count=7),                                       # the storage is shorter than it claims
    tensor_pickle(offset=1), tensor_pickle(stride=(4, 1)),        # the tensor reaches beyond it
    tensor_pickle(size=(5,), stride=(2**60,)),                    # 2**64 bytes: past the end, or 0 if it overflows
    tensor_pickle(size=(5,), stride=(-2**60,)),
    tensor_pickle(size=(2**70,), stride=(0,)), tensor_pickle(size=(2**62, 8), stride=(0, 0)),
    tensor_pickle(offset=-1), tensor_pickle(size=(-2, 3)), tensor_pickle(offset=5, stride=(-3, 1)),
    tensor_pickle(stride=(1,)), tensor_pickle(size=None), tensor_pickle(size=('2', 3)), tensor_pickle(offset=0.0),
    tensor_pickle(storage=opcodes('O')), tensor_pickle(storage=opcodes('uint32')), tensor_pickle(count='6'),
    tensor_pickle(inner=tensor_pickle(size=(2**20,), stride=(0,))[2:-1], size=(2**20,), stride=(1,)),
    tensor_pickle(inner=opcodes(b'bytes')),
    b'\x80\x02ctorch._utils\n_rebuild_tensor_v2\n' + opcodes((None, {'__func__': len})) + b'b.',  # sets an attribute
    b'\x80\x02ctorch\nSize\n' + opcodes((None, {'__call__': len})) + b'b.',
    b'', b'\x80\x02', b'garbage', b'\x80\x02(' + opcodes('storage') + b'tQ.', b'\x80\xff.'])
def test_a_malformed_tensor_is_refused(content, tmp_path):
    assert 'ckpt.pt' in refusal(read_torch_checkpoint, torch_file(tmp_path, content))


@pytest.mark.parametrize('size, stride', [((3, 6), (0, 1)), ((7,), (0,)), ((2, 2, 2), (1, 1, 1)), ((2**40, 6), (0, 1))])
def test_a_tensor_with_more_elements_than_its_storage_is_refused(size, stride, tmp_path):
    path = torch_file(tmp_path, tensor_pickle(size=size, stride=stride))
    assert 'is larger than its storage' in refusal(read_torch_checkpoint, path)


@pytest.mark.parametrize('size, stride', [((6,), (0,)), ((3, 2), (1, 3)), ((2, 3), (0, 2)), ((), ()), ((0, 9), (9, 9))])
def test_a_view_that_is_not_larger_than_its_storage_is_read(size, stride, tmp_path):
    path = torch_file(tmp_path, tensor_pickle(size=size, stride=stride))
    data = np.arange(6, dtype=np.float32)
    want = np.lib.stride_tricks.as_strided(data, size, [4 * step for step in stride])
    np.testing.assert_array_equal(read_torch_checkpoint(path), want)


def test_a_zip_archive_that_is_larger_inside_is_refused(tmp_path):
    path = tmp_path / 'ckpt.pt'
    with zipfile.ZipFile(path, 'w', zipfile.ZIP_DEFLATED) as archive:
        archive.writestr('archive/data.pkl', tensor_pickle(count=250_000))
        archive.writestr('archive/data/0', bytes(10**6))
    assert 'larger than the file' in refusal(read_torch_checkpoint, path)


def test_a_storage_that_is_not_in_the_file_is_named(tmp_path):
    path = copy_folder(GOLDEN / 'nanogpt', tmp_path) / 'ckpt.pt'
    edit_zip(path, lambda name, content: content[:-1] if name == 'data/3' else content)
    assert 'storage 3' in refusal(load_pretrained, path)
    path = write_zip(path, {'archive/data.pkl': tensor_pickle()})
    assert 'archive/data/0' in refusal(load_pretrained, path)


def test_other_file_formats_are_recognized():
    assert 'torch.save(torch.load(' in refusal(read_torch_checkpoint, GOLDEN / 'legacy.pt')
    assert 'no data.pkl' in refusal(read_torch_checkpoint, GOLDEN / 'logits.npz')
    assert 'not a zip file' in refusal(read_torch_checkpoint, GOLDEN / 'hf' / 'model.safetensors')


@pytest.mark.parametrize('model_args', [None, 3, {'n_layer': 2}, dict(
    n_layer=2, n_head=2, n_embd=16, block_size=24, vocab_size='41')])
@pytest.mark.parametrize('model', [{}, [], {3: 4}, {'transformer.wte.weight': 'text'}])
def test_a_checkpoint_with_other_things_inside_is_refused(model, model_args, tmp_path):
    path = torch_file(tmp_path, pickle.dumps({'model': model, 'model_args': model_args}, 2))
    assert 'ckpt.pt' in refusal(load_pretrained, path)
    good = dict(n_layer=2, n_head=2, n_embd=16, block_size=24, vocab_size=41)
    path = torch_file(tmp_path, pickle.dumps({'model': model, 'model_args': good}, 2))
    assert 'ckpt.pt' in refusal(load_pretrained, path)


def test_a_checkpoint_of_another_program_is_refused_by_what_it_lacks(tmp_path):
    path = torch_file(tmp_path, pickle.dumps({'state_dict': {}, 'epoch': 3}, 2))
    assert 'lacks model, model_args, so it is not a checkpoint of nanoGPT' in refusal(load_pretrained, path)
