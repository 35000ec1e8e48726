"""Corruptions: functions that make one thing in the output of a scheduler wrong.

A function whose parameter is not the output returns a corruption. The step has two rows: requests a and b in a decode
step, c and d in a prefill step.
"""

import copy


def set_cached_field(field, value, row=0):
    """Return a function that sets one row of a list in `scheduled_cached_reqs`."""

    def corrupt(out):
        getattr(out.scheduled_cached_reqs, field)[row] = value

    return corrupt


def set_new_field(field, value, row=0):
    """Return a function that sets an attribute of an entry in `scheduled_new_reqs`."""

    def corrupt(out):
        setattr(out.scheduled_new_reqs[row], field, value)

    return corrupt


def set_scheduled_count(request_id, value):
    """Return a function that sets a request's entry in `num_scheduled_tokens`."""

    def corrupt(out):
        out.num_scheduled_tokens[request_id] = value

    return corrupt


def set_padded_counts(**counts):
    """Return a function that sets entries of `num_scheduled_tokens_padded`, given by request id."""

    def corrupt(out):
        out.num_scheduled_tokens_padded.update(counts)

    return corrupt


def all_of(*corruptions):
    """Return a function that applies several corruptions in order."""

    def corrupt(out):
        for corruption in corruptions:
            corruption(out)

    return corrupt


def set_attribute(name, value):
    """Return a function that sets an attribute of the output."""

    def corrupt(out):
        setattr(out, name, value)

    return corrupt


def delete_attribute(name):
    """Return a function that deletes an attribute of the output."""

    def corrupt(out):
        delattr(out, name)

    return corrupt


def rename_running_request(out):
    """Replace the id of the running request b by "z", an id that no output has introduced."""
    out.scheduled_cached_reqs.req_ids[1] = "z"
    for counts in (out.num_scheduled_tokens, out.num_scheduled_tokens_padded):
        counts["z"] = counts.pop("b")


def list_new_request_twice(out):
    """List the new request c again, in place of d and at the end."""
    out.scheduled_new_reqs[1] = out.scheduled_new_reqs[0]
    out.scheduled_new_reqs.append(out.scheduled_new_reqs[0])


def omit_scheduled_request(out):
    """Delete the token counts of d, which stays in `scheduled_new_reqs`."""
    del out.num_scheduled_tokens["d"], out.num_scheduled_tokens_padded["d"]


def mark_running_request_finished(out):
    """Report the scheduled request b as finished."""
    out.finished_req_ids = {"b"}


def add_third_prompt(out):
    """Add a third prompt, e, to a prefill step with c and d."""
    third = copy.copy(out.scheduled_new_reqs[0])
    third.req_id = "e"
    out.scheduled_new_reqs.append(third)
    out.num_scheduled_tokens["e"] = 1
    out.num_scheduled_tokens_padded.update(d=43, e=1)
