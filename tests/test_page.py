"""The page of sample_jax.py --serve in a real browser: Debian's chromium, driven by playwright, with axe's rules for
people who cannot see or use a mouse. Skipped where these are not installed; .ci/run installs them."""
import shutil
import urllib.request

import pytest

from tests.common import GOLDEN, free_port, start, wait_for

pytestmark = pytest.mark.slow
CHROMIUM = shutil.which('chromium')


@pytest.fixture(scope='module')
def url():
    """The address of a server of a small model with a chat template."""
    port = free_port()
    process = start('sample_jax.py', f'--init_from={GOLDEN / "letters"}', '--device=cpu:0', f'--serve={port}',
                    '--max_new_tokens=40', '--temperature=0')
    url = f'http://127.0.0.1:{port}/'

    def answers():
        try:
            return urllib.request.urlopen(f'{url}health', timeout=5).status == 200
        except OSError:
            return False

    wait_for('the server', answers, process)
    yield url
    process.terminate()
    process.communicate(timeout=60)


@pytest.fixture(scope='module')
def browser():
    playwright = pytest.importorskip('playwright.sync_api')
    if not CHROMIUM:
        pytest.skip('chromium is not installed')
    quiet = ['--no-sandbox', '--disable-gpu', '--disable-background-networking', '--disable-component-update',
             '--disable-sync', '--no-first-run']
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=quiet)
        yield browser
        browser.close()


@pytest.fixture(params=['desk', 'phone'])
def page(request, browser, url):
    size = {'desk': {'width': 1000, 'height': 700}, 'phone': {'width': 360, 'height': 640}}[request.param]
    context = browser.new_context(viewport=size)
    page = context.new_page()
    page.set_default_timeout(30_000)
    page.goto(url)
    page.wait_for_selector('#model:not(:text("loading"))')
    yield page
    context.close()


def ask(page, question):
    """Asks, and waits for the end of the answer, which is returned."""
    page.fill('#input', question)
    page.press('#input', 'Enter')
    page.wait_for_selector('#again:visible')
    return page.locator('#chat .assistant').last.text_content()


def check_with_axe(page):
    axe = pytest.importorskip('axe_playwright_python.sync_playwright').Axe().run(page)
    assert axe.violations_count == 0, axe.generate_report()


def test_a_conversation_survives_a_reload_and_an_answer_can_be_asked_again(page):
    first = ask(page, 'aa')
    second = ask(page, 'ca')
    assert first and second and page.locator('#chat .user').all_text_contents() == ['aa', 'ca']
    page.fill('#input', 'a draft')
    page.reload()
    page.wait_for_selector('#chat .assistant >> nth=1')
    assert page.locator('#chat .assistant').all_text_contents() == [first, second]
    assert page.input_value('#input') == 'a draft'
    page.click('#again')
    page.wait_for_selector('#again:visible')
    assert page.locator('#chat .assistant').all_text_contents() == [first, second]  # greedy: the same


def test_an_answer_that_is_cut_can_go_on(page):
    first = ask(page, 'g')
    assert 'Cut at 40 tokens' in page.text_content('#chat')
    page.click('#more')
    page.wait_for_selector('#again:visible')
    longer = page.locator('#chat .assistant').last.text_content()
    assert longer.startswith(first) and len(longer) > len(first)


def test_a_refused_question_stays_in_the_field(page):
    page.fill('#input', 'ab ' * 3000)
    page.press('#input', 'Enter')
    page.wait_for_selector('#chat .note')
    assert page.input_value('#input') == 'ab ' * 3000
    assert page.locator('#chat .user').count() == 0


def test_axe_finds_nothing_and_nothing_is_wider_than_the_window(page):
    check_with_axe(page)
    ask(page, 'g')
    check_with_axe(page)
    assert page.evaluate('document.documentElement.scrollWidth <= window.innerWidth')
    assert page.evaluate('document.documentElement.scrollHeight <= window.innerHeight')
