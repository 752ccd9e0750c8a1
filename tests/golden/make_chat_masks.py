"""Writes chat_masks.json beside it: what of conversations counts in training, by transformers' assistant mask. Run by
hand; needs transformers and jinja2:

    python tests/golden/make_chat_masks.py

The templates are written after the published ones. {% generation %} marks by hand what the
assistant says after the request for an answer; the templates as published have no such marks.
"""
import json
import re
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).parent

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + END }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m.content + END + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")

TEMPLATES = {
    'chatml': CHATML.replace('END', "'<|im_end|>'"),
    'chatml_with_a_newline_before_the_end': CHATML.replace('END', "'\n<|im_end|>'"),
    'llama2': (
        "{% if messages[0].role == 'system' %}{% set loop_messages = messages[1:] %}"
        "{% set system = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}"
        "{% else %}{% set loop_messages = messages %}{% set system = '' %}{% endif %}"
        "{% for m in loop_messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
        "{% if m.role == 'user' %}"
        "{{ bos_token + '[INST] ' + ((system if loop.first else '') + m.content).strip() + ' [/INST]' }}"
        "{% else %}{% generation %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endgeneration %}{% endif %}"
        "{% endfor %}"),
    'llama3': (
        "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content|trim + '<|eot_id|>' }}{% endgeneration %}"
        "{% else %}{{ m.content|trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"),
    'qwen3': (  # thinks in the last turn only
        "{% set ns = namespace(last=-1) %}"
        "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{% if m.role == 'assistant' %}{% generation %}{% set content = m.content %}{% set thought = '' %}"
        "{% if '</think>' in content %}"
        "{% set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
        "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
        "{% if loop.index0 > ns.last and (loop.last or thought) %}"
        "{{ '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}"
        "{% else %}{{ content }}{% endif %}{{ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
        "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"),
    'gpt_oss': (  # an answer ends with another token in history than at the end, and thinking is dropped from history
        "{{ '<|start|>system<|message|>You are ChatGPT.\nReasoning: medium<|end|>' }}"
        "{% for m in messages %}{% if m.role == 'system' %}"
        "{{ '<|start|>developer<|message|># Instructions\n\n' + m.content + '<|end|>' }}"
        "{% elif m.role == 'assistant' %}{{ '<|start|>assistant' }}{% generation %}"
        "{% if m.thinking and loop.last %}"
        "{{ '<|channel|>analysis<|message|>' + m.thinking + '<|end|><|start|>assistant' }}{% endif %}"
        "{{ '<|channel|>final<|message|>' + m.content }}"
        "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endgeneration %}"
        "{% else %}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"),
    'gemma': (
        "{{ bos_token }}{% if messages[0].role == 'system' %}{% set loop_messages = messages[1:] %}"
        "{% set system = messages[0].content + '\n\n' %}"
        "{% else %}{% set loop_messages = messages %}{% set system = '' %}{% endif %}"
        "{% for m in loop_messages %}"
        "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content|trim + '<end_of_turn>' }}{% endgeneration %}"
        "{{ '\n' }}{% else %}{{ (system if loop.first else '') + m.content|trim + '<end_of_turn>\n' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"),
    'mistral': (  # the system message goes before the last question
        "{% if messages[0].role == 'system' %}{% set loop_messages = messages[1:] %}"
        "{% set system = messages[0].content + '\n\n' %}"
        "{% else %}{% set loop_messages = messages %}{% set system = '' %}{% endif %}{{ bos_token }}"
        "{% for m in loop_messages %}{% if m.role == 'user' %}"
        "{{ '[INST] ' + (system if m == (loop_messages|selectattr('role', 'equalto', 'user')|list)[-1] else '')"
        " + m.content + '[/INST]' }}"
        "{% else %}{% generation %}{{ ' ' + m.content + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"),
    'deepseek': (
        "{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}"
        "{% set ns.system = m.content %}{% endif %}{% endfor %}{{ bos_token + ns.system }}"
        "{% for m in messages %}{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}"
        "{% elif m.role == 'assistant' %}{{ '<｜Assistant｜>' }}{% generation %}"
        "{{ m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}{% endgeneration %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"),
    'phi3': (  # a conversation without a request ends with a second token
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' }}"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|end|>' }}{% endgeneration %}{{ '\n' }}"
        "{% else %}{{ m.content + '<|end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ '<|endoftext|>' }}{% endif %}"),
    'plain': (  # nothing but text ends an answer
        "{% for m in messages %}{{ m.role + ': ' }}"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '\n\n' }}{% endgeneration %}"
        "{% else %}{{ m.content + '\n\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"),
}
SPECIAL = ('<s> </s> <|im_start|> <|im_end|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|start|> <|channel|> '
           '<|message|> <|end|> <|return|> <start_of_turn> <end_of_turn> <｜User｜> <｜Assistant｜> '
           '<｜end▁of▁sentence｜> <|system|> <|user|> <|assistant|> <|endoftext|> [INST] [/INST]').split()


def chat(*contents, system=None):
    roles = ('user', 'assistant') * len(contents)
    messages = [{'role': role, 'content': text} for role, text in zip(roles, contents)]
    return [{'role': 'system', 'content': system}, *messages] if system else messages


CHATS = [
    chat('Hi', 'Hello there.'),
    chat('Hi', 'Hello there.\n', 'And?', 'More. ', 'So?', '\n\nEnd \n\n'),
    chat('a or b', 'a', 'i', 'i', 'think final', 'think', 'think', 'final'),
    chat('n', 'h', 'final or analysis', 'assistant', 'model', 'user', 'message', 'e'),
    chat('Say nothing.', '', 'Again.', '', 'And again.', ' '),
    chat('Say yes.', 'Say yes.', 'yes', 'yes', 'yes', 'yes'),
    chat('Hi', 'Hello', 'Bye', 'Good night', system='Be brief.'),
    chat('2+2?', '<think>\nIt is 4.\n</think>\n\n4', '3+3?', '<think>\nIt is 6.\n</think>\n\n6\n'),
    [*chat('Hi', 'Hello', 'How?'), {'role': 'assistant', 'content': 'So.', 'thinking': 'Hmm, final.'}],
    [*chat('Hi'), {'role': 'assistant', 'content': 'Hello', 'thinking': 'So.'}, *chat('How?', 'So.')],
    chat('Ünïcode é 世界?', 'Já, 世界 \U0001f600.\n', 'x', '\u2028é'),
]


TOOLS = [{'type': 'function', 'function': {'name': 'add', 'description': 'Adds "numbers" <b>', 'parameters': {
    'type': 'object', 'properties': {'a': {'type': 'number'}, 'b': {'type': 'number'}}, 'required': ['a', 'b']}}}]
TOOL_TEMPLATES = {  # written after the published ones
    'qwen_tools': (
        "{% if tools %}{{ '<|im_start|>system\n# Tools\n' }}"
        "{% for tool in tools %}{{ '\n' + tool|tojson }}{% endfor %}"
        "{{ '<|im_end|>\n' }}{% endif %}"
        "{% for m in messages %}{% if m.role == 'tool' %}"
        "{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
        "{% else %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
        "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
        "{{ m.content or '' }}{% for call in m.tool_calls or [] %}"
        "{% if call.function %}{% set call = call.function %}{% endif %}"
        "{{ '\n<tool_call>\n{\"name\": \"' + call.name + '\", \"arguments\": ' }}"
        "{{ call.arguments if call.arguments is string else call.arguments|tojson }}{{ '}\n</tool_call>' }}"
        "{% endfor %}{{ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
        "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"),
    'llama3_tools': (  # no text beside a call, and the tools before the first question
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}"
        "{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' + m.content|tojson + '<|eot_id|>' }}"
        "{% else %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
        "{% if m.role == 'assistant' %}{% generation %}{% if 'tool_calls' in m %}"
        "{% set call = m.tool_calls[0].function %}"
        "{{ '{\"name\": \"' + call.name + '\", \"parameters\": ' + call.arguments|tojson + '}' }}"
        "{% else %}{{ m.content|trim }}{% endif %}{{ '<|eot_id|>' }}{% endgeneration %}"
        "{% else %}{% if tools is not none and loop.first %}"
        "{% for tool in tools %}{{ tool|tojson(indent=4) + '\n\n' }}{% endfor %}{% endif %}"
        "{{ m.content|trim + '<|eot_id|>' }}{% endif %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"),
}


def call(arguments, **more):
    return {'role': 'assistant', 'tool_calls': [
        {'id': 'x1', 'type': 'function', 'function': {'name': 'add', 'arguments': arguments}}], **more}


TOOL_CHATS = [  # (messages, tools, other variables)
    (chat('2+2?', '4'), TOOLS, {}), (chat('2+2?', '4'), None, {'enable_thinking': False}),
    ([*chat('2+2?'), call({'a': 2, 'b': 2}, content=None)], TOOLS, {}),
    ([*chat('2+2?'), call({'a': 2, 'b': 2}), {'role': 'tool', 'content': '4'}, *chat('x', 'add')[1:],
      *chat('And "é"?', 'More.')], TOOLS, {}),
    ([*chat('add?'), call('{"a": 2}', content=''), {'role': 'tool', 'name': 'add', 'content': 'add'},
      *chat('x', 'Four.')[1:]], TOOLS, {'enable_thinking': True}),
]


def make_tokenizer(chars):
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(chars))}, []))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token) for token in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token='<s>', eos_token='</s>')


def pieces(tokenizer, template, messages, **variables):
    """The text in pieces that in turn do not count and count."""
    out = tokenizer.apply_chat_template(
        messages, chat_template=template, return_dict=True, return_assistant_tokens_mask=True, **variables)
    tokens = tokenizer.convert_ids_to_tokens(out['input_ids'])
    text = ''.join(tokens)
    assert text == tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **variables)
    counts = [counted for token, counted in zip(tokens, out['assistant_masks']) for _ in token]
    edges = [i for i in range(1, len(text)) if counts[i] != counts[i - 1]]
    assert not counts[0] and edges
    return [text[a:b] for a, b in zip([0, *edges], [*edges, len(text)])]


def decoded(messages):
    """The messages with objects where arguments are a text of JSON, as OpenAI's API has them."""
    messages = json.loads(json.dumps(messages))
    for message in messages:
        for each in message.get('tool_calls', ()):
            if isinstance(each['function']['arguments'], str):
                each['function']['arguments'] = json.loads(each['function']['arguments'])
    return messages


def unmarked(template):
    return re.sub(r'{% (end)?generation %}', '', template)


def main():
    contents = ''.join(message['content'] for messages in CHATS for message in messages)
    tokenizer = make_tokenizer({*str(CHATS), *str(TEMPLATES), *str(TOOLS), *str(TOOL_CHATS), *contents, '\n'})
    tool_cases = []
    for name, template in TOOL_TEMPLATES.items():
        for messages, tools, variables in TOOL_CHATS:
            prompt = tokenizer.apply_chat_template(
                messages[:1], chat_template=unmarked(template), tokenize=False, add_generation_prompt=True, tools=tools,
                **variables)
            tool_cases.append({
                'template': name, 'messages': messages, 'tools': tools, 'variables': variables, 'prompt': prompt,
                'pieces': pieces(tokenizer, template, decoded(messages), tools=tools, **variables)})
    plain = {name: unmarked(template) for name, template in TEMPLATES.items()}
    cases = []
    for name, template in TEMPLATES.items():
        for messages in CHATS:
            assert tokenizer.apply_chat_template(messages, chat_template=plain[name], tokenize=False) == \
                tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
            cases.append({'template': name, 'messages': messages, 'pieces': pieces(tokenizer, template, messages)})
    golden = {'special': SPECIAL, 'templates': plain, 'marked': TEMPLATES, 'cases': cases,
              'tool_templates': {name: unmarked(template) for name, template in TOOL_TEMPLATES.items()},
              'tool_marked': TOOL_TEMPLATES, 'tool_cases': tool_cases}
    (HERE / 'chat_masks.json').write_text(json.dumps(golden, indent=1, ensure_ascii=False) + '\n', encoding='utf-8')


if __name__ == '__main__':
    main()
