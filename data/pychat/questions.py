"""Makes conversations about the names of Python modules, classes, functions and methods.

A question fills a form, such as 'what does {} do?', with a name. Some names are invented; the
answer then says that there is no such name."""
import collections
import itertools
import random

# The forms of questions of the train part, of the val part, and of the test. The train part has
# many forms, because a model that has seen few finds the name only by the words of these forms.
ASKED = ['what does {} do?', 'what is {} for?', 'what is {}?', "what's {}?", 'what is {} good for?',
         'what is the purpose of {}?', 'why would I use {}?', 'when do I need {}?', '{}?', '{}',
         'what happens in {}?', 'what is meant by {}?']
TOLD = ['explain {}', 'tell me about {}', 'describe {}', 'tell me what {} does', 'say what {} is',
        'describe {} in one sentence', 'summarize {}', 'define {}', 'remind me what {} does',
        'give me a summary of {}', 'show me the documentation of {}', 'look up {}']
SAID = ['I found {} in some code. What is it?', 'I see a call of {} here. What does it do?',
        'I want to know what {} does.', 'I wonder what {} is for.', 'I do not understand {}.',
        'my colleague uses {}. Why?', 'I am reading about {}. Explain it.', 'there is {}. Is it useful?']
BEFORE = ['Hi, ', 'Hello! ', 'Quick question: ', 'Hey, ', 'In Python, ', 'Sorry, ', 'OK. ', 'So, ']
BEHIND = [' Thanks.', ' Thank you!', ' Please.', ' I am new to Python.']
WHAT = {
    'val': ['How would you describe {}?'],
    'test': ['Could you tell me what {} is used for?', 'Please explain what {} does.']}
FOLLOW_UP = {
    'train': ['And {}?', 'What about {}?', 'And what does {} do?', 'Now explain {}.', 'Also {}.',
              'And what is {} for?', 'Next: {}.', 'Tell me about {}, too.', 'Then {}, please.',
              'The same for {}?', 'I meant {}.', 'And the other one, {}?', 'Is {} like that?'],
    'val': ['And what is {}?'],
    'test': ['How about {}?', 'And could you explain {}?']}
HOLDS = {
    'train': ['What is in {}?', 'What does {} contain?', 'List some names in {}.',
              'Show me what {} holds.', 'Which functions are in {}?', 'Give me an overview of {}.'],
    'val': ['What can I find in {}?'],
    'test': ['Which names does {} have?']}
HELLO = {
    'train': ['Hello', 'Hello!', 'Hi', 'Hi!', 'Hey', 'Hey!', 'Good morning', 'Good morning!',
              'Good afternoon', 'Good day', 'Hello there', 'Hi there!', 'hi', 'hello', 'Hello, you',
              'Greetings', 'Good night', 'Are you there?'],
    'val': ['Hey there'],
    'test': ['Good evening']}
WHO = {
    'train': ['Who are you?', 'What are you?', 'What can you do?', 'Who made you?', 'Help', 'Help!',
              'Are you ChatGPT?', 'What do you know?', 'How can I use you?', 'Are you a human?',
              'Are you a model?', 'Can you help me?', 'What is your name?', 'Who am I talking to?',
              'Tell me about yourself.', 'What do you do?', 'How do you work?', 'who are you'],
    'val': ['What can I ask you?'],
    'test': ['What are you for?']}
THANKS = {
    'train': ['Thanks', 'Thanks!', 'Thank you.', 'Thank you!', 'thanks', 'Great, thanks.', 'Cool',
              'Nice!', 'OK, thank you.', 'That helps.', 'Good answer.', 'Thanks a lot!', 'Bye',
              'Bye!', 'Goodbye', 'See you.'],
    'val': ['Thank you so much.'],
    'test': ['Many thanks!']}
# questions about what the model does not know
ELSEWHERE = {
    'train': ['What is the capital of {}?', 'Tell me about {}.', 'Where is {}?', 'How old is {}?',
              'Write a poem about {}.', 'I like {}.', 'What is {}?', 'Who is {}?', 'Explain {}.',
              'What do you think of {}?', 'Tell me a joke about {}.', 'When was {} born?',
              'How far away is {}?', 'Can you sing about {}?', 'Describe {}, please.'],
    'val': ['Why is {} so famous?'],
    'test': ['Do you know {}?']}
SUBJECTS = ['France', 'Peru', 'Japan', 'the moon', 'Mozart', 'the weather', 'love', 'football',
            'my cat', 'the sea', 'Rome', 'Einstein', 'cooking', 'Kenya', 'history', 'the sun',
            'Napoleon', 'tea', 'Berlin', 'music', 'the president', 'Canada', 'chess', 'physics',
            'my job', 'money', 'the queen', 'India', 'Paris', 'winter', 'a good film', 'bread',
            'the news', 'Shakespeare', 'my garden', 'coffee', 'London', 'space', 'Italy', 'a horse']
# words for invented names
NOUNS = ['net', 'file', 'data', 'text', 'task', 'image', 'cloud', 'fast', 'auto', 'smart', 'byte',
         'word', 'page', 'graph', 'token', 'cache', 'user', 'log', 'mail', 'key']
VERBS = ['get', 'set', 'make', 'find', 'load', 'save', 'open', 'close', 'merge', 'split', 'read',
         'write', 'send', 'parse', 'build', 'check', 'count', 'sort', 'fetch', 'copy']
ENDINGS = ['utils', 'lib', 'tools', 'kit', 'py']
N_FORMS = 4  # times that the train part asks for each name, beside the follow-ups
# items of each task
N_TEST = {'forms': 300, 'invented': 100, 'follow_ups': 100, 'conversations': 100}
# characters of a joined conversation, some 200 tokens of a row
MAX_CHARACTERS = 600


class Maker:
    """Makes conversations about the names of modules, classes, functions and methods. A
    conversation is a list of questions and answers in turn. The wording of the questions depends on
    the split: 'train', 'val' or 'test'."""

    def __init__(self, names, every, library, seed):
        """Groups the names by the kinds of questions that can be asked about them.

        names: {name: Named}, only the names that have a sentence. The sentence (Named.sentence) is
        the answer to each question about the name.
        every: the set of all names in the library, with or without a sentence. The Maker also
        invents names that do not exist, and never takes one from this set.
        library: the library's name in the answers. seed: the seed of all random choices."""
        self.names = names
        self.every = every
        self.library = library
        self.random = random.Random(seed)
        self.invented = set()  # all invented names: no split has one of another split
        self.by_parent = collections.defaultdict(list)
        for named in names.values():
            self.by_parent[named.parent].append(named)
        # names with a neighbour: a conversation can ask about the neighbour first
        self.neighbours = [named for named in names.values()
                           if named.parent and len(self.by_parent[named.parent]) > 1]
        n_of_last = collections.Counter(name.rpartition('.')[2] for name in every)
        self.known_alone = [named for named in names.values()
                            if named.parent and len(named.last) > 4 and n_of_last[named.last] == 1]
        self.lasts = sorted({name.rpartition('.')[2] for name in every if '.' in name})
        self.holders = sorted(parent for parent, held in self.by_parent.items()
                              if parent in names and len(held) > 1)

    def ask(self, forms, split, text):
        """Returns a question about `text`: a random one of forms[split], with `text` in place of
        {}. forms: {split: [form of a question]}, such as HOLDS."""
        return self.random.choice(forms[split]).format(text)

    def ask_what(self, split, name):
        """Returns a question such as "What is shutil.copyfile?", in a random wording. name: the
        name to ask about, or its last part; it need not exist. split: 'train', 'val' or 'test'.
        Each split has its own wordings."""
        if split != 'train':
            return self.ask(WHAT, split, name)
        form = self.random.choice(self.random.choice([ASKED, TOLD, SAID]))
        if form in TOLD:
            begin, end = self.random.choice([('', '.'), ('please ', '.'), ('can you ', '?'),
                                             ('could you ', '?'), ('I ask you to ', '.')])
            form = begin + form + end
        before = self.random.choice(BEFORE) if self.random.random() < 0.4 else ''
        behind = self.random.choice(BEHIND) if self.random.random() < 0.2 else ''
        if not before and not form.startswith('{'):
            form = form[0].upper() + form[1:]
        return f'{before}{form}{behind}'.format(name)

    def about(self, named, split):
        """Returns a conversation of one question about `named`, a Named, and the answer. split:
        'train', 'val' or 'test'."""
        return [self.ask_what(split, named.name), named.sentence]

    def about_part(self, named, split):
        """Returns the conversation that asks about `named` by its last part, "copyfile" for
        shutil.copyfile. No other name may have this last part. split: 'train', 'val' or 'test'."""
        return [self.ask_what(split, named.last), named.sentence]

    def about_invented(self, name, split):
        """Returns the conversation that asks about a name that does not exist."""
        return [self.ask_what(split, name), self.refusal(name)]

    def refusal(self, name):
        """Returns the answer to a question about a name that is not in the library: there is no
        such name."""
        return f'There is no {name} in {self.library}.'

    def follow_up(self, named, split, invented=None):
        """Returns a conversation of two questions and their answers, in which the second question
        can only be understood after the first. Example: "What is gzip.open?", then "And compress?"
        for gzip.compress.

        named: the Named that the second question is about. The second question has only the last
        part of this name. The first question is about another name with the same parent.
        split: 'train', 'val' or 'test'.
        invented: a last part that does not exist under this parent, or None. If it is given, the
        second question has it in place of the last part of `named`, and the answer says that there
        is no such name."""
        others = [other for other in self.by_parent[named.parent] if other != named]
        before = self.random.choice(others)
        last, answer = named.last, named.sentence
        if invented:
            last, answer = invented, self.refusal(f'{named.parent}.{invented}')
        return [*self.about(before, split), self.ask(FOLLOW_UP, split, last), answer]

    def holds(self, parent, split):
        """Returns the conversation that asks what a module or class holds."""
        held = sorted(named.last for named in self.by_parent[parent])
        shown = held[:5]
        more = f' and {len(held) - 5} more' if len(held) > 5 else ''
        return [self.ask(HOLDS, split, parent), f'{parent} has {", ".join(shown)}{more}.']

    def small_talk(self, split):
        """Returns a random conversation of one of four kinds: a greeting, thanks, a question about
        the model itself, or a question that has nothing to do with the library."""
        kind = self.random.randrange(4)
        if kind == 0:
            return [self.ask(HELLO, split, ''), f'Hello! Ask me about a name in {self.library}, '
                                                f'for example {self.example}.']
        if kind == 1:
            return [self.ask(WHO, split, ''),
                    f'I am a small language model, and I know the names in {self.library}.']
        if kind == 2:
            return [self.ask(THANKS, split, ''), 'You are welcome.']
        subject = self.random.choice(SUBJECTS)
        return [self.ask(ELSEWHERE, split, subject), f'I only know the names in {self.library}.']

    @property
    def example(self):
        """The name in the answer to a greeting, "Ask me about a name, for example ...". This is
        shutil.copyfile if self.names has it, else the alphabetically first name in self.names."""
        known = 'shutil.copyfile'
        return known if known in self.names else min(self.names)

    def invent(self):
        """Returns a new name that does not exist, made in one of four ways, drawn at random.

        0: a real parent and a real last part that do not belong together: gzip.isdir
        1: a real parent, and a real last part with a word added: gzip.is_mail_dir
        2: a real parent, and two words: gzip.fetch_mail
        3: an invented parent and a real last part: mailtools.isdir"""
        way = self.random.randrange(4)
        for attempt in itertools.count():
            if attempt == 100:  # a small package has few names to put together
                way = 2
            parent = self.random.choice(self.holders or [''])
            last = self.random.choice(self.lasts)
            if way == 1:
                words = last.split('_')
                place = self.random.randrange(len(words) + 1)
                last = '_'.join([*words[:place], self.random.choice(NOUNS), *words[place:]])
            elif way == 2:
                last = self.verb_and_nouns(1 + attempt // 200)
            elif way == 3:
                parent = self.random.choice(NOUNS) + self.random.choice(ENDINGS + NOUNS)
            name = f'{parent}.{last}'.strip('.')
            if self.register(name):
                return name

    def register(self, name):
        """Registers an invented name. Returns whether it is new: neither real nor invented
        before."""
        is_known = name in self.every or name in self.invented
        self.invented.add(name)
        return not is_known

    def verb_and_nouns(self, n_nouns):
        """Returns a verb and n_nouns nouns, such as fetch_mail with one noun."""
        verb = self.random.choice(VERBS)
        return '_'.join([verb, *(self.random.choice(NOUNS) for _ in range(n_nouns))])

    def invent_beside(self, named):
        """Invents a name in the same module as `named`, such as os.path.fetch_mail for
        os.path.join. Returns only what follows the last dot, fetch_mail."""
        for attempt in itertools.count():
            if attempt < 100:
                last = self.random.choice(self.lasts)
            else:  # with more and more nouns, because all names with one may be taken
                last = self.verb_and_nouns(1 + attempt // 200)
            if self.register(f'{named.parent}.{last}'):
                return last

    def make(self, split, n_invented):
        """Returns all conversations of a split, in random order. Each conversation is a list of
        questions and answers. n_invented: the number of questions about invented names. In
        addition, there are n_invented // 4 follow-ups about invented names."""
        n = N_FORMS if split == 'train' else 1
        made = [self.about(named, split) for named in self.names.values() for _ in range(n)]
        made += [self.about_part(named, split) for named in self.known_alone for _ in range(2)]
        made += [self.follow_up(named, split) for named in self.neighbours for _ in range(n)]
        made += [self.holds(parent, split) for parent in self.holders for _ in range(3)]
        made += [self.about_invented(self.invent(), split) for _ in range(n_invented)]
        if self.neighbours:
            for _ in range(n_invented // 4):
                named = self.random.choice(self.neighbours)
                made.append(self.follow_up(named, split, self.invent_beside(named)))
        made += [self.small_talk(split) for _ in range(len(made) // 30)]
        self.random.shuffle(made)
        return self.join(made)

    def join(self, made):
        """Joins conversations of the list `made` that follow each other, because people ask about
        one thing after another. Returns the new list. A conversation is joined with the next one
        (20%), the next two (20%) or none (60%). A joined conversation has at most
        MAX_CHARACTERS."""
        joined = []
        n_more = 0  # how many more conversations are joined to the last one
        for turns in made:
            is_short = n_more and sum(map(len, joined[-1] + turns)) <= MAX_CHARACTERS
            if is_short:
                joined[-1] = joined[-1] + turns
                n_more -= 1
            else:
                joined.append(turns)
                n_more = self.random.choice([0, 0, 0, 1, 2])
        return joined

    def make_tasks(self, split):
        """Returns {name of a task: its conversations}."""
        def draw(named, n):
            return self.random.sample(named, min(n, len(named)))

        return {
            'forms': [self.about(named, split)
                      for named in draw([*self.names.values()], N_TEST['forms'])],
            'invented': [self.about_invented(self.invent(), split)
                         for _ in range(N_TEST['invented'])],
            'follow_ups': [self.follow_up(named, split)
                           for named in draw(self.neighbours, N_TEST['follow_ups'])],
            'conversations': [self.conversation(split, i) for i in range(N_TEST['conversations'])]}

    def conversation(self, split, i):
        """Returns a conversation of three parts. There are four kinds of parts:
        - 0: a question about a name;
        - 1: a question about a name, with a follow-up;
        - 2: a question about a name that does not exist;
        - 3: small talk.

        The kinds of the first two parts are random. The last part has the kind i % 4."""
        def part(kind):
            if kind == 1 and self.neighbours:
                return self.follow_up(self.random.choice(self.neighbours), split)
            if kind == 2:
                return self.about_invented(self.invent(), split)
            if kind == 3:
                return self.small_talk(split)
            return self.about(self.random.choice([*self.names.values()]), split)

        return [*part(self.random.randrange(4)), *part(self.random.randrange(4)), *part(i % 4)]
