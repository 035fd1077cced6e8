"""Small tasks that are each broken in one way, by the gate that must say so."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rsi.admission.contamination import HeldOut
from rsi.types import Task
from tests.corpus.sound import REPOSITORY, WORDS, sort_lines
from tests.corpus.write import LIMITS, Files, by_bash, by_pytest, by_script, changed, managed, task


@dataclass(frozen=True)
class Broken:
    """also: gates that the same fault may fail as well."""

    gate: str
    files: Files
    also: tuple[str, ...] = ()


SORT = "Sort the lines of words.txt into sorted.txt.\n"
SORTED = "apple\\nfig\\nfig\\nfig\\npear\\npear\\nplum"
IS_SORTED = f"has sorted.txt $'{SORTED}'"
INPUTS = {"words.txt": WORDS}
HELD_INSTRUCTION = (
    "Take the harbour ledger apart: one file for every captain, cargo in the order of unloading, and a last line that "
    "gives the sum of the crates which each of them brought ashore between the two storms of that summer.\n"
)
HELD_GUID = "7a1cf0de-52b4-4d37-9c1e-0b6f3e9d8a55"
HELD_SOLUTION = (
    "for captain in $(cut -d ';' -f 2 ledger.txt | sort -u); do "
    'grep ";$captain;" ledger.txt > ashore/$captain.txt; done\n'
)
HELD_OUT = HeldOut.from_tasks(
    [
        Task(
            "sha256:0",
            "",
            HELD_INSTRUCTION,
            {
                "instruction.md": f"<!-- canary {HELD_GUID} -->\n{HELD_INSTRUCTION}".encode(),
                "solution/solve.sh": HELD_SOLUTION.encode(),
            },
        )
    ]
)


def sort(
    tests: Mapping[str, str | bytes] | None = None, solution: str = "sort words.txt > sorted.txt\n", **more
) -> Files:
    """The task of sorting words.txt, with something else about it."""
    more = {"instruction": SORT, "inputs": INPUTS, **more}
    return task(solution=solution, tests=tests or by_bash(IS_SORTED), **more)


def reward_by(test: str) -> str:
    return f"if {test}; then r=1; else r=0; fi\necho $r > /logs/verifier/reward.txt\n"


TWO_OUTPUTS = {
    "instruction": "Sort the lines of words.txt into sorted.txt, and its distinct lines into distinct.txt.\n",
    "solution": """
        sort words.txt > sorted.txt
        sort -u words.txt > distinct.txt
        """,
}

STRUCTURE = {
    "no instruction": changed(sort_lines(), {"instruction.md": None}),
    "an empty instruction": changed(
        sort_lines(),
        {"instruction.md": "\n  \n"},
    ),
    "no solution": changed(sort_lines(), {"solution/solve.sh": None}),
    "no tests": changed(sort_lines(), {"tests/test.sh": None}),
    "task.toml is no TOML": changed(
        sort_lines(),
        {"task.toml": "[task\nname =\n"},
    ),
    "network is not ruled out": changed(
        sort_lines(),
        {
            "task.toml": """
        [task]
        name = "rsi/corpus"
        """
        },
    ),
    "a Dockerfile beyond the subset": sort(dockerfile="EXPOSE 80\n"),
    "a COPY of what is not there": sort(dockerfile="COPY nowhere/ /app/\n"),
    "the workdir is the system's": sort(dockerfile="WORKDIR /usr/share\n"),
    "Windows line ends": changed(
        sort_lines(),
        {"solution/solve.sh": "#!/bin/bash\r\nsort words.txt > sorted.txt\r\n"},
    ),
}

BUILD = {
    "a step that fails": sort(dockerfile="RUN make-believe --all\n"),
    "an installation from the network": sort(dockerfile="RUN apt-get install -y cowsay || pip install cowsay\n"),
    "a user that is not there": sort(dockerfile="USER nobody-knows\n"),
    "a step that runs out of time": sort(dockerfile="RUN sleep 30\n", limits=replace(LIMITS, build_timeout_s=1.0)),
}

REFERENCE = {
    "the wrong output": sort(solution="sort -r words.txt > sorted.txt\n"),
    "a file that is not there": sort(solution="sort word.txt > sorted.txt\n"),
    "right, and then an error": sort(
        solution="""
        sort words.txt > sorted.txt
        exit 3
        """
    ),
    "half of it": sort(by_bash(IS_SORTED, "has distinct.txt $'apple\\nfig\\npear\\nplum'")),
    "the reference never ends": sort(
        solution="""
            sort words.txt > sorted.txt
            sleep 60
            """,
        limits=replace(LIMITS, agent_timeout_s=1.0),
    ),
    "an output outside of the workdir": sort(
        by_bash(f"has /opt/sorted.txt $'{SORTED}'"), "sort words.txt > /opt/sorted.txt\n"
    ),
}

NOOP = {
    "tests of nothing": sort(
        managed("""
        def test_nothing():
            pass
        """)
    ),
    "tests of the inputs alone": sort(by_bash("[ -f words.txt ]", "[ -s words.txt ]")),
    "a constant reward": sort(by_script("echo 1 > /logs/verifier/reward.txt\n")),
    "half is there from the start": sort(by_bash("[ -f words.txt ]", IS_SORTED)),
    "the work is done already": sort(dockerfile="RUN sort words.txt > sorted.txt\n"),
}

RESET = {
    "a random key": sort(dockerfile="RUN od -An -N8 -tx8 /dev/urandom > key.txt\n"),
    "the time of the build": sort(dockerfile="RUN date +%s%N > built.txt\n"),
    "a shuffled input": sort(dockerfile="RUN seq 400 | shuf > numbers.txt\n"),
}

DETERMINISM = {
    "this year": sort(
        managed(
            f"from verify import check_text\n"
            f"\n"
            f"\n"
            f"def test_year():\n"
            f"    check_text('year.txt', '{time.strftime('%Y')}')\n"
        ),
        "date +%Y > year.txt\n",
        instruction="Write the current year to year.txt.\n",
    ),
    "the time zone": sort(
        by_bash("has zone.txt UTC"),
        "date +%Z > zone.txt\n",
        instruction="Write the name of the time zone to zone.txt.\n",
    ),
    "the name of the host": sort(
        by_bash("has host.txt sandbox"),
        "hostname > host.txt\n",
        instruction="Write the name of this host to host.txt.\n",
    ),
    "the locale": sort(
        by_bash("has length.txt 4"),
        """
            word=$(cat word.txt)
            echo ${#word} > length.txt
            """,
        instruction="Write the number of characters of the word in word.txt to length.txt.\n",
        inputs={"word.txt": "grün\n"},
    ),
    "the day of the week": sort(
        by_bash(f"has day.txt {time.strftime('%a', time.gmtime())}"),
        "LC_ALL=C TZ=UTC date +%a > day.txt\n",
        instruction="Write today's day of the week, in three letters, to day.txt.\n",
    ),
}

LEAKAGE = {
    "the commands in the instruction": sort(
        instruction="Sort words.txt. Hint: run `sort words.txt | tr a-z A-Z > sorted.txt` for it.\n",
        solution="sort words.txt | tr a-z A-Z > sorted.txt\n",
        tests=by_bash("has sorted.txt $'APPLE\\nFIG\\nFIG\\nFIG\\nPEAR\\nPEAR\\nPLUM'"),
    ),
    "the value in the instruction": sort(
        by_bash("has sum.txt dbc26ca89ca3"),
        "head -c 12 <(sha256sum words.txt) > sum.txt\n",
        instruction="Write the first 12 digits of the SHA-256 of words.txt to sum.txt. (It should be dbc26ca89ca3.)\n",
    ),
    "the solution in the image": sort(
        solution="""
            sort words.txt > /tmp/all.txt
            mv /tmp/all.txt sorted.txt
            """,
        inputs={
            **INPUTS,
            ".build/run.sh": """
                sort words.txt > /tmp/all.txt
                mv /tmp/all.txt sorted.txt
                """,
        },
        dockerfile="COPY files/.build/run.sh /opt/run.sh\n",
    ),
    "the tests in the image": sort(
        by_pytest(
            """
                def test_sorted():
                    lines = open('/app/sorted.txt').read().split()
                    assert lines == ['apple', 'fig', 'fig', 'fig', 'pear', 'pear', 'plum']
                """
        ),
        inputs={
            **INPUTS,
            "spec/test_state.py": """
                def test_sorted():
                    lines = open('/app/sorted.txt').read().split()
                    assert lines == ['apple', 'fig', 'fig', 'fig', 'pear', 'pear', 'plum']
                """,
        },
    ),
    "the answer in the image": sort(inputs={**INPUTS, "cache/page-7": SORTED.replace("\\n", "\n") + "\n"}),
    "the answer made by the build": sort(dockerfile="RUN sort words.txt > /var/tmp/.expected\n"),
    "a folder of tests in the image": sort(dockerfile="RUN mkdir /tests && echo sorted > /tests/expected\n"),
    "the mended program in the history": sort(
        by_bash('[ "$(python3 -I twice.py 4)" = 8 ]', '[ "$(python3 -I twice.py 5)" = 10 ]'),
        "sed -i 's/+ 2/* 2/' twice.py\n",
        instruction="twice.py is to print twice its argument, and does not. Mend it.\n",
        inputs={
            "twice.py": """
            import sys

            print(int(sys.argv[1]) * 2)
            """
        },
        dockerfile=REPOSITORY + "RUN sed -i 's/[*] 2/+ 2/' twice.py && git commit -qam wip\n",
    ),
}

CONTAMINATION = {
    "a held-out instruction": sort(instruction=f"{SORT}Then think of this:\n{HELD_INSTRUCTION}"),
    "a held-out solution": sort(
        solution=f"mkdir ashore; touch ledger.txt\n{HELD_SOLUTION}sort words.txt > sorted.txt\n"
    ),
    "a canary": sort(instruction=f"<!-- canary GUID {HELD_GUID} -->\n{SORT}"),
    "a canary in a comment of the tests": sort(
        by_script(f"# {HELD_GUID.upper()}\n" + reward_by("diff <(sort words.txt) sorted.txt"))
    ),
}

DIFF = "diff <(sort words.txt) sorted.txt >/dev/null"
TAMPERING = {
    "modules of the workdir": sort(
        by_script(reward_by("python3 -m pytest -q -p no:cacheprovider /tests/test_state.py >/dev/null"))
        | {
            "test_state.py": (
                """
                def test_it():
                    words = open('words.txt').readlines()
                    assert open('sorted.txt').readlines() == sorted(words)
                """
            )
        }
    ),
    "python -c in the workdir": sort(
        by_script(
            """
                python3 -c 'import json; assert list(open("sorted.txt")) == sorted(open("words.txt"))' 2>/dev/null
                [ $? = 0 ] && r=1 || r=0
                echo $r > /logs/verifier/reward.txt
                """
        )
    ),
    "a reward from the workdir": sort(
        by_script(
            f"[ -e reward.txt ] || {{ {DIFF} && echo 1 > reward.txt || echo 0 > reward.txt; }}\n"
            f"cp reward.txt /logs/verifier/reward.txt\n"
        )
    ),
    "tools of the workdir": sort(
        by_script("export PATH=/app/bin:$PATH\n" + reward_by("grep -q apple <(head -n 1 sorted.txt) && " + DIFF))
    ),
    "tests that lie in the workdir": sort(
        by_script(reward_by("bash check_order.sh")),
        inputs={**INPUTS, "check_order.sh": f"{DIFF}\n"},
    ),
    "tests run among the agent's files": sort(
        by_script(
            "cp /tests/test_state.py .\n"
            + reward_by("python3 -P -m pytest -q -p no:cacheprovider test_state.py >/dev/null")
        )
        | {
            "test_state.py": (
                """
                def test_it():
                    words = open('words.txt').readlines()
                    assert open('sorted.txt').readlines() == sorted(words)
                """
            )
        }
    ),
    "a log directory in the workdir": sort(
        by_script(
            f"mkdir -p logs/verifier\n"
            f"[ -e logs/verifier/reward.txt ] || {{ {DIFF} && echo 1 || echo 0; }} > logs/verifier/reward.txt\n"
            "cp logs/verifier/reward.txt /logs/verifier/\n"
        ),
        solution="sort words.txt > sorted.txt\n",
    ),
}

MUTATION = {
    "one of two outputs": sort(by_bash(IS_SORTED), **TWO_OUTPUTS),
    "the first line alone": sort(
        by_bash('[ "$(head -n 1 sorted.txt)" = apple ]'),
        """
            sort words.txt > sorted.txt
            sed -i 's/fig/FIG/' sorted.txt
            sed -i 's/plum/PLUM/' sorted.txt
            """,
        instruction="Sort words.txt into sorted.txt, and write fig and plum in capitals there.\n",
    ),
    "one of three outputs": sort(
        by_bash(IS_SORTED, "[ ! -e words.txt ]"),
        """
            sort words.txt > sorted.txt
            sort -u words.txt > distinct.txt
            sort -r words.txt > reverse.txt
            rm words.txt
            """,
        instruction="Sort words.txt into sorted.txt, distinct.txt (-u) and reverse.txt (-r), then remove it.\n",
    ),
    "a part of a configuration": sort(
        by_bash("grep -q '^port=9090' app.ini"),
        """
            sed -i 's/^port=.*/port=9090/' app.ini
            sed -i 's/^host=.*/host=::1/' app.ini
            sed -i 's/^log=.*/log=on/' app.ini
            """,
        instruction="In app.ini set port to 9090, host to ::1 and log to on.\n",
        inputs={
            "app.ini": """
            port=1
            host=a
            log=off
            """
        },
    ),
}

PLAUSIBLE_WRONG = {
    "that a file is there": sort(by_bash("[ -e sorted.txt ]")),
    "that a file is not empty": sort(by_bash("[ -s sorted.txt ]")),
    "that a file is JSON": sort(
        by_script(reward_by("jq . words.json >/dev/null 2>&1")),
        "jq -R . words.txt | jq -s . > words.json\n",
        instruction="Write words.json: a list of the lines of words.txt.\n",
    ),
    "that no line is lost": sort(by_bash('[ "$(wc -l < sorted.txt)" = 7 ]')),
}

VERIFIER_HEALTH = {
    "no reward when a test fails": sort(by_script(f"set -e\n{DIFF}\necho 1 > /logs/verifier/reward.txt\n")),
    "not a number": sort(by_script(f"{DIFF} && r=1 || r=nan\necho $r > /logs/verifier/reward.txt\n")),
    "an empty reward": sort(by_script(f"{DIFF} && r=1 || r=\nprintf %s $r > /logs/verifier/reward.txt\n")),
    "a reward of 100": sort(by_script(f"{DIFF} && r=100 || r=0\necho $r > /logs/verifier/reward.txt\n")),
    "a reward in another place": sort(by_script(reward_by(DIFF).replace("/logs/verifier/", "/logs/"))),
    "JSON without the key": sort(
        by_script(f"{DIFF} && r=1 || r=0\necho '{{\"score\": '$r'}}' > /logs/verifier/reward.json\n")
    ),
    "an early exit": sort(by_script(f"[ -e sorted.txt ] || exit 0\n{reward_by(DIFF)}")),
    "apt-get at test time": sort(by_script(f"apt-get update -qq 2>/dev/null\n{reward_by(DIFF)}")),
    "pip at test time": sort(by_script(f"pip install -q pytest 2>/dev/null || true\n{reward_by(DIFF)}")),
    "the network in a test": sort(
        by_pytest(
            """
                import urllib.request


                def test_sorted():
                    host = 'words.example.org'
                    wanted = urllib.request.urlopen(f'http://{host}/sorted').read()
                    assert open('/app/sorted.txt', 'rb').read() == wanted
                """
        )
    ),
    "a download in the script": sort(
        by_script(
            f"curl -sf https://words.example.org/sorted -o /tmp/wanted || sort words.txt > /tmp/wanted\n"
            f"{reward_by(DIFF)}"
        )
    ),
    "the log where the reward belongs": sort(
        by_script(f"{DIFF} && echo passed > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt\n")
    ),
}

COST = {
    "a large image": sort(dockerfile="RUN truncate -s 300M /opt/blob\n"),
    "tests at the edge of their time": sort(
        by_script(f"sleep 1.1\n{reward_by(DIFF)}"), limits=replace(LIMITS, verifier_timeout_s=2.0)
    ),
    "a reference at the edge of its time": sort(
        solution="""
            sleep 1.1
            sort words.txt > sorted.txt
            """,
        limits=replace(LIMITS, agent_timeout_s=2.0),
    ),
}

ALSO = {
    "plausible_wrong": ("mutation",),  # who does not look at a file's contents sees no mutant of them either
    "noop": ("mutation", "plausible_wrong"),
}
BROKEN: dict[str, Broken] = {
    f"{gate}: {name}": Broken(gate, files, ALSO.get(gate, ()))
    for gate, tasks in {
        "structure": STRUCTURE,
        "build": BUILD,
        "reference": REFERENCE,
        "noop": NOOP,
        "reset": RESET,
        "determinism": DETERMINISM,
        "leakage": LEAKAGE,
        "contamination": CONTAMINATION,
        "tampering": TAMPERING,
        "mutation": MUTATION,
        "plausible_wrong": PLAUSIBLE_WRONG,
        "verifier_health": VERIFIER_HEALTH,
        "cost": COST,
    }.items()
    for name, files in tasks.items()
}
