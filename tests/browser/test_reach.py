"""Phones, keyboards, screen readers: everybody can use the pages."""

import pytest

from tests.support.dashboard import eventually, says, settled, until

ORDERS = "/default/orders"
ROUTES = {
    "overview": "#/",
    "topics": "#/topics",
    "topic": f"#/topics{ORDERS}",
    "messages": f"#/topics{ORDERS}/messages?limit=25",
    "oddities": "#/topics/default/oddities/messages",
    "pipeline": "#/pipeline",
    "brokers": "#/brokers",
    "health": "#/health/subscriptions",
    "dead letters": f"#/topics{ORDERS}/dead-letters",
    "none": "#/none",
}
WITHOUT_NAMES = """() => {
    const bad = (one) => one.outerHTML.slice(0, 200);
    const text = (one) => (one?.textContent ?? '').trim();
    const tables = [...document.querySelectorAll('table')].filter((one) => !text(one.caption)
        || !one.querySelector('thead th')
        || [...one.querySelectorAll('thead th')]
            .some((head) => head.scope !== 'col' || !text(head)));
    const controls = [...document.querySelectorAll('button, a[href], input, select, summary')]
        .filter((one) => !(one.getAttribute('aria-label') || text(one)
            || [...(one.labels ?? [])].map(text).join('')));
    const pictures = [...document.querySelectorAll('svg')].filter((one) =>
        one.getAttribute('aria-hidden') !== 'true' && !one.getAttribute('aria-label'));
    return [...tables, ...controls, ...pictures].map(bad);
}"""
"""Tables without a caption or headers, controls and pictures without a name."""
CUT_TABLES = """() => [...document.querySelectorAll('.table-box')]
    .filter((one) => one.scrollWidth > one.clientWidth).length"""
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}


def visit(page, site, route):
    page.goto(f"{site.url}/{route}")
    settled(page)


def test_a_phone_never_scrolls_sideways(shop, open_page):
    page = open_page(shop, **PHONE)
    for width in (390, 320):
        page.set_viewport_size({"width": width, "height": 844})
        for name, route in ROUTES.items():
            visit(page, shop, route)
            for button in page.locator("button.toggle").all()[:6]:
                button.click()
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide <= width, f"{name} is {wide} wide on a screen of {width}"
    visit(page, shop, ROUTES["topic"])
    page.set_viewport_size({"width": 390, "height": 844})
    page.get_by_role("button", name="Seek billing").tap()
    box = page.locator("dialog[open]").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 390
    assert page.locator("dialog[open] button").first.bounding_box()["height"] >= 40


def test_everything_can_be_done_with_the_keyboard(shop, open_page):
    page = open_page(shop)
    settled(page)

    def press_until(found, key="Tab", most=60):
        for _ in range(most):
            page.keyboard.press(key)
            if page.evaluate(f"() => {{ const at = document.activeElement; return {found}; }}"):
                return
        raise AssertionError(f"{found} is not reached with {key}")

    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    assert page.evaluate("location.hash") in ("", "#/")

    press_until(f"at.innerText === '{ORDERS}'")
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    page.keyboard.press("Enter")
    page.wait_for_selector(f"h1:text-is('{ORDERS}')")
    # A new page begins at its heading, for eyes and ears alike.
    eventually(lambda: page.evaluate("document.activeElement.innerText") == ORDERS)
    settled(page)
    press_until("at.type === 'radio'")
    page.keyboard.press("ArrowRight")
    until(page, "document.querySelector('.tier-map').dataset.start !== '0'")

    press_until("at.getAttribute('aria-label') === 'Seek reports'")
    page.keyboard.press("Enter")
    page.wait_for_selector("dialog[open]")
    assert page.evaluate("document.querySelector('dialog').contains(document.activeElement)")
    press_until("at.name === 'offset'")
    page.keyboard.type("123")
    page.keyboard.press("Enter")
    page.wait_for_selector(".toast")
    assert shop.subscription(ORDERS, "reports")["cursor"] == 123
    until(page, "document.activeElement.getAttribute('aria-label') === 'Seek reports'")

    visit(page, shop, ROUTES["messages"])
    press_until("at.classList.contains('toggle')")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.getAttribute('aria-expanded')") == "true"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.getAttribute('aria-expanded')") == "false"


def test_keys_lead_to_the_filter_and_to_pages(shop, open_page):
    page = open_page(shop, "#/brokers")
    settled(page)
    page.keyboard.press("?")
    dialog = page.locator("dialog[open]")
    says(dialog, "Filter topics or messages")
    page.keyboard.press("/")
    assert dialog.is_visible()
    page.keyboard.press("Escape")
    dialog.wait_for(state="detached")
    # A page without a filter leads to that of topics.
    page.keyboard.press("/")
    until(page, "document.activeElement.id === 'search'")
    page.keyboard.type("/g?")
    assert page.get_by_role("searchbox").input_value() == "/g?"
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.tagName") == "BODY"
    page.keyboard.press("g")
    page.keyboard.press("h")
    page.wait_for_selector("h1:text-is('Health')")
    visit(page, shop, ROUTES["messages"])
    page.wait_for_selector("#contains")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.name") == "contains"


def test_the_theme_is_chosen_and_kept(shop, open_page):
    page = open_page(shop, color_scheme="light")
    settled(page)
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    button = page.get_by_role("button", name="Theme: auto")
    button.click()
    assert page.evaluate(ground) == light
    page.get_by_role("button", name="Theme: light").click()
    dark = page.evaluate(ground)
    assert dark != light
    page.reload()
    settled(page)
    assert page.evaluate(ground) == dark
    page.get_by_role("button", name="Theme: dark").click()
    assert page.evaluate(ground) == light
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(ground) == dark
    assert page.evaluate("localStorage.length") == 0


def test_pages_have_landmarks_headings_and_tables_with_names(shop, open_page):
    page = open_page(shop)
    for name, route in ROUTES.items():
        visit(page, shop, route)
        assert page.locator("h1").count() == 1, name
        assert page.locator("main").count() == 1
        assert page.get_by_role("navigation", name="Pages").count() == 1
        assert page.get_by_role("banner").count() == 1
        assert page.locator("[role=status][aria-live=polite]").count() >= 1
        current = page.locator("#nav [aria-current=page]").all_inner_texts()
        assert len(current) == (0 if name == "none" else 1), name
        assert page.evaluate(WITHOUT_NAMES) == [], name
        # Nothing of a table is beyond its edge.
        assert page.evaluate(CUT_TABLES) == 0, name


@pytest.mark.nightly
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(shop, open_page, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    # The dark pages differ from the light ones in their colours only.
    rules = {"runOnly": ["color-contrast"]} if scheme == "dark" else None
    page = open_page(shop, color_scheme=scheme)
    found = {}
    for name in ROUTES.keys() - {"oddities", "none"}:
        visit(page, shop, ROUTES[name])
        for button in page.locator("button.toggle").all()[:2]:
            button.click()
        found[name] = axe.run(page, options=rules)
    visit(page, shop, ROUTES["topic"])
    for name in ("Seek billing", "Failure policy of billing", "Publish a message", "Policies…"):
        page.get_by_role("button", name=name).click()
        page.wait_for_selector("dialog[open]")
        found[f"dialog {name}"] = axe.run(page, options=rules)
        page.keyboard.press("Escape")
        page.wait_for_selector("dialog[open]", state="detached")
    page.set_viewport_size({"width": 390, "height": 844})
    visit(page, shop, ROUTES["topics"])
    found["phone"] = axe.run(page, options=rules)
    problems = {
        name: [
            (one["id"], [node["html"][:160] for node in one["nodes"][:3]])
            for one in results.response["violations"]
        ]
        for name, results in found.items()
        if results.response["violations"]
    }
    assert not problems, problems


def test_the_form_to_sign_in_is_sound_too(guarded, open_page):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page = open_page(guarded, **PHONE)
    page.wait_for_selector("h1:text-is('Sign in')")
    assert axe.run(page).response["violations"] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
