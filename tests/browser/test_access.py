"""The dashboard of a broker that wants to know who calls."""

import pytest

from tests.support.dashboard import reads, says, settled, until
from tests.support.security import sign

TOPIC = "/default/secrets"


def sign_in(page, token):
    page.get_by_label("Token or API key").fill(token)
    page.get_by_role("button", name="Sign in").click()


def test_nobody_gets_in_without_credentials_and_out_again(guarded, open_page):
    page = open_page(guarded, f"#/topics{TOPIC}")
    page.wait_for_selector("h1:text-is('Sign in')")
    assert TOPIC not in page.locator("main").inner_text()
    sign_in(page, "not-a-token")
    page.wait_for_selector("[role=alert]")
    says(page.locator("[role=alert]"), "Not accepted")
    assert page.get_by_label("Token or API key").input_value() == ""

    sign_in(page, sign("root"))
    page.wait_for_selector(f"h1:text-is('{TOPIC}')")
    settled(page)
    says(page.locator("#account"), "root")
    # Only this tab knows it, and only while it is open.
    assert page.evaluate("sessionStorage.length") == 1
    assert page.evaluate("localStorage.length") == 0
    assert page.evaluate("document.cookie") == ""
    assert page.context.cookies() == []
    page.reload()
    page.wait_for_selector(f"h1:text-is('{TOPIC}')")

    page.get_by_role("button", name="Sign out").click()
    page.wait_for_selector("h1:text-is('Sign in')")
    assert page.evaluate("sessionStorage.length") == 0
    assert "root" not in page.locator("body").inner_text()


@pytest.mark.nightly
def test_a_token_that_ends_leads_back_to_the_form(guarded, open_page):
    page = open_page(guarded, "#/topics")
    sign_in(page, sign("root", lifetime_seconds=4))
    page.wait_for_selector(f"a:text-is('{TOPIC}')")
    page.wait_for_selector("h1:text-is('Sign in')")
    says(page.locator("[role=alert]"), "Not accepted")


def test_who_may_only_look_sees_no_actions_and_no_messages(guarded, open_page):
    page = open_page(guarded, f"#/topics{TOPIC}")
    sign_in(page, sign("viewer"))
    page.wait_for_selector(f"h1:text-is('{TOPIC}')")
    settled(page)
    says(page.locator("main"), "You have read-only access to this topic.")
    assert page.get_by_role("button", name="Seek audit").count() == 0
    assert page.get_by_role("button", name="Unload").count() == 0
    assert page.get_by_role("button", name="Delete").count() == 0
    publish = page.get_by_role("button", name="Publish a message")
    assert publish.is_disabled()
    assert "permission produce" in publish.get_attribute("title")
    page.get_by_role("link", name="Messages", exact=True).click()
    page.wait_for_selector(".empty")
    says(page.locator("main"), "You may see this topic, but not its messages.")
    # The broker refuses as well, whatever a page offers.
    status = page.evaluate(
        """async () => (await fetch('api/topics/default/secrets/unload', {
            method: 'POST', body: '{}', headers: {
                'Content-Type': 'application/json', 'X-Ister-Action': 'yes',
                Authorization: `Bearer ${sessionStorage.getItem('ister.credential')}`}})).status"""
    )
    assert status == 403
    page.goto(f"{guarded.url}/#/pipeline")
    # A button that would be refused says why.
    until(page, "document.querySelector('[aria-label=\"Compact now\"]')?.disabled")
    says(page.locator("main"), "needs the permission manage_broker")
    page.goto(f"{guarded.url}/#/topics")
    page.get_by_role("button", name="Create a topic").wait_for()
    create = page.get_by_role("button", name="Create a topic")
    assert create.is_disabled()
    assert "permission manage_topic" in create.get_attribute("title")


def test_who_may_consume_reads_messages_but_changes_nothing(guarded, open_page):
    page = open_page(guarded, f"#/topics{TOPIC}/messages")
    sign_in(page, sign("reader"))
    page.wait_for_selector(".brief")
    reads(page.locator(".brief"), "the answer is 42")
    page.goto(f"{guarded.url}/#/topics{TOPIC}")
    until(page, "document.querySelector('main').innerText.includes('read-only access')")


def test_who_has_no_rights_is_told_so(guarded, open_page):
    page = open_page(guarded, f"#/topics{TOPIC}")
    sign_in(page, sign("stranger"))
    page.wait_for_selector("section.problem")
    says(page.locator("section.problem"), "Permission denied")
    page.goto(f"{guarded.url}/#/")
    page.wait_for_selector("h1:text-is('Overview')")
    until(page, "document.querySelector('section.problem') !== null")
    # Another credential is one button away.
    page.get_by_role("button", name="Sign out").click()
    page.wait_for_selector("h1:text-is('Sign in')")
