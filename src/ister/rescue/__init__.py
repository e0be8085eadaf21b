"""Is it whole, and who has a copy? Examines what is stored, repairs it, and rebuilds metadata.

    examine ─► bad ranges ─► sources of their messages ─► mend ─► published under the owner's claim

Four commands and the opening of a topic end here: `ister inspect` prints an examination, `ister
pipeline scrub` maps it over Spark, `ister repair` mends under the claim, `ister recover` rebuilds.
All of them walk frames with `ister.format.frame_walk`.

examine_files       the files of a topic's log, damaged or not
examine_object      one object, by what is in it
object_check        one object against its descriptor
catalog_check       a topic's catalog against the listing of its bucket
mend                makes an object again, from whichever source has its messages
local_log           what is left of a damaged log, and putting it in order again
repair              restores what one tier lost from the other; `ister repair`
giving_up           gives up what no tier has
rebuild             a topic's metadata from the bucket alone
recover             `ister recover`
danube              objects that Danube wrote: what is in them, and which are taken
"""
