"""Conversations as text and token ids: chat templates, and what of a conversation counts in training."""
import json
import os
import re
import time

import numpy as np

from jax_flags import UserError

MARKS = '\ufdd0\ufdd1'  # around what the assistant says in a rendered chat: noncharacters, which no text has


def read_chat_template(folder, settings):
    """The chat template of a Hugging Face folder with these settings, of tokenizer_config.json; None without one."""
    path = folder / 'chat_template.jinja'
    if path.exists():
        return path.read_text(encoding='utf-8')
    template = settings.get('chat_template')
    if not isinstance(template, list):
        return template
    templates = {each['name']: each['template'] for each in template}
    return templates.get('default', next(iter(templates.values()), None))


class ChatTemplate:
    """A program in Jinja that writes a conversation as a text, as the model has learned it."""

    def __init__(self, source, special):
        """source: the template, or None. special: {name: text} of the tokens that it may write, such as 'bos_token'.
        Raises UserError without a template, or for one that cannot be read."""
        if source is None:
            raise UserError('the model has no chat template: there is none beside its tokenizer.json')
        self.special = special
        try:
            self.template = create_jinja().from_string(source)
        except Exception as error:  # a template is a program
            raise cannot_be_rendered(error) from None

    def render(self, messages, *, add_generation_prompt, marked=False):
        """The text of messages [{'role': 'system', 'user' or 'assistant', 'content': text}], followed by the beginning
        of the next answer if add_generation_prompt, and with MARKS around what the template marks as the assistant's if
        marked. Raises UserError if the template refuses them or fails."""
        try:
            text = self.template.render(
                messages=messages, tools=None, add_generation_prompt=add_generation_prompt, **self.special)
        except UserError:
            raise
        except Exception as error:  # a template is a program
            raise cannot_be_rendered(error) from None
        return text if marked else re.sub(f'[{MARKS}]', '', text)


def cannot_be_rendered(error):
    return UserError(f"the model's chat template cannot be rendered: {type(error).__name__}: {error}")


def create_jinja():
    """The environment of chat templates. What {% generation %} ... {% endgeneration %} marks is between MARKS."""
    import jinja2.ext
    import jinja2.sandbox

    class GenerationTag(jinja2.ext.Extension):
        tags = {'generation'}

        def parse(self, parser):
            next(parser.stream)
            begin, end = (jinja2.nodes.Output([jinja2.nodes.TemplateData(mark)]) for mark in MARKS)
            return [begin, *parser.parse_statements(['name:endgeneration'], drop_needle=True), end]

    def raise_exception(message):
        raise UserError(f"the model's chat template refuses: {message}")

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    jinja = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=['jinja2.ext.loopcontrols', GenerationTag])
    jinja.filters['tojson'] = tojson
    jinja.globals |= {'raise_exception': raise_exception, 'strftime_now': time.strftime}
    return jinja


def encode_training_chat(tokenizer, messages):
    """(ids, mask) of a conversation by the chat template of an HFTokenizer; the mask, as long as the ids, is 1 for the
    assistant's tokens. Those are what the template marks by {% generation %}; without such marks each answer, from the
    end of the request for it (the generation prompt) to the special token that ends it.

    Raises UserError if the template refuses the messages, or writes an answer where it does not ask for one."""
    text = tokenizer.template.render(messages, add_generation_prompt=False, marked=True)
    pieces = re.split(f'[{MARKS}]', text)
    text = ''.join(pieces)
    encoding = tokenizer.tokenizer.encode(text, add_special_tokens=False)
    starts, ends = np.array(encoding.offsets).reshape(-1, 2).T
    special = tokenizer.special_ids.union(tokenizer.stop_tokens)
    is_special = np.isin(encoding.ids, list(special))
    bounds = np.cumsum([len(piece) for piece in pieces]).tolist()
    spans = list(zip(bounds[:-1:2], bounds[1::2]))
    if not spans:
        special_spans = list(zip(starts[is_special], ends[is_special]))
        spans = [find_answer(tokenizer.template, messages, i, text, special_spans)
                 for i, message in enumerate(messages) if message['role'] == 'assistant']
    mask = np.zeros(len(starts), np.uint8)
    for start, end in spans:  # a special token that takes in the spaces after it belongs to what it follows
        mask[(starts < end) & (ends > start) & ~(is_special & (starts < start))] = 1
    return encoding.ids, mask


def find_answer(template, messages, i, text, special_spans):
    """(start, end) of answer i, as it counts in training, in `text`, the rendering of all messages, whose special
    tokens have the (start, end) of special_spans. Other renderings, with a mark in place of the answer, tell what
    the template writes around it, whatever it says and whatever the template rewrites of earlier turns."""
    refusal = UserError(f"the model's chat template does not write answer {i} where it asks for it; mark what the "
                        'assistant says in it by {% generation %} ... {% endgeneration %}')
    marked = [*messages[:i], messages[i] | {'content': MARKS[0]}]
    around, around_last = (template.render(chat, add_generation_prompt=False, marked=True).split(MARKS[0])
                           for chat in (marked + messages[i + 1:], marked))
    if not len(around) == len(around_last) == 2 or not text.endswith(around[1]):
        raise refusal
    (before, after), (before_last, after_last) = around, around_last
    content_end = len(text) - len(after)
    request = template.render(messages[:i], add_generation_prompt=True)

    start = len(request)
    if not text.startswith(request):  # the template writes earlier turns differently when others follow
        prompt = request.removeprefix(template.render(messages[:i], add_generation_prompt=False))
        introduction = before_last.removeprefix(request)  # what the template writes between request and answer
        if not text.startswith(before) or not before.endswith(prompt + introduction):
            raise refusal
        start = len(before) - len(introduction)
    if start > content_end:
        raise refusal

    shared = len(os.path.commonprefix([after, after_last]))
    for special_start, special_end in special_spans:
        if special_start >= start and special_end > content_end:
            if special_end <= content_end + shared:
                return start, special_end
            if shared < len(after_last) and not text[content_end:special_start].strip():
                return start, special_end  # another one than at the end of a conversation: gpt-oss
            break
    return start, content_end + (shared if shared == len(after_last) else 0)


def final_answer(text):
    """What of an answer belongs to the conversation. gpt-oss writes <|channel|>analysis<|message|>...<|end|> first,
    which its template takes for an error in a message. (The other models' templates drop <think>...</think>.)"""
    if '<|channel|>' not in text:
        return text
    return text.partition('<|channel|>final<|message|>')[2].partition('<|end|>')[0]
