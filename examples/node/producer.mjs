// A whole producer for gllm in one file: the package `redis` (node-redis) and nothing of ours. See docs/protocol.md.
//
//     node producer.mjs "The capital of France is" --max-tokens 32
//     node producer.mjs "Once upon a time" --id story-1     # again with the same id: the same job, read from its start
//
// Ctrl-C cancels the job.

import { randomUUID } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";
import { parseArgs } from "node:util";
import { crc32 } from "node:zlib";
import { ClientClosedError, createClient, ErrorReply } from "redis";

// What passes by itself, of a server's answers: one that starts, fails over, is busy or full.
const PASSING = /^(LOADING|READONLY|MASTERDOWN|CLUSTERDOWN|TRYAGAIN|BUSY |OOM|MISCONF|NOREPLICAS|UNBLOCKED)/;
const PATIENCE_MS = 60_000; // in a row that Redis may be away
const PAUSE_MS = 200; // before the next try
const BLOCK_MS = 1000; // of one read; the socket's timeout must be longer

/** Whether the same command may work in a while. What is no answer of the server is the connection's. */
function passes(error) {
    return error instanceof ErrorReply ? PASSING.test(error.message) : !(error instanceof ClientClosedError);
}

/** What was read of a reply so far. An event may repeat what is known: that is compared and dropped. */
class Reply {
    ids = [];
    characters = 0; // code points, as the protocol counts them; a string's length counts UTF-16 units
    ended = false;

    /** The text that an event adds. */
    add(event) {
        if (event.type === "error") throw new Error(`${event.code}: ${event.message}`);
        if (event.type === "done") {
            const count = this.ids.length;
            if (event.usage.completion_tokens !== count) {
                throw new Error(`the reply ended with other tokens than the ${count} that were read`);
            }
            this.ended = true;
            return event.text; // what was held back: it might have begun a stop string
        }
        return event.type === "tokens" ? this.#tokens(event) : "";
    }

    #tokens({ from, at, ids, text }) {
        const known = this.ids.length - from;
        if (known < 0 || ids.slice(0, known).some((id, i) => id !== this.ids[from + i])) {
            throw new Error(`a hole, or another reply than the one read before, at token ${from}`);
        }
        if (known >= ids.length) return "";
        const added = [...text].slice(this.characters - at);
        this.ids.push(...ids.slice(known));
        this.characters += added.length;
        return added.join("");
    }
}

/** Submits jobs to one queue, reads their replies, cancels them. */
class Producer {
    #awaySince = null;

    constructor(url, queue = "default") {
        // The library connects again on its own, but repeats no command: what may be repeated is decided here.
        const reconnectStrategy = (tries, error) => passes(error) && tries * PAUSE_MS < PATIENCE_MS ? PAUSE_MS : error;
        const socket = { socketTimeout: 10_000, reconnectStrategy };
        this.options = { url, RESP: 2, disableOfflineQueue: true, pingInterval: 4000, socket };
        this.base = `gllm:{${queue}}:`;
    }

    async connect() {
        this.redis = await this.#connected();
        return this;
    }

    async #connected() {
        const client = createClient(this.options);
        client.on("error", () => {}); // each command says it too
        await client.connect();
        return client;
    }

    close() {
        this.redis.destroy();
    }

    /** Add a job, with a deadline in so many seconds. May be repeated: a queue takes an id once. */
    async submit(job, id, { priority = "normal", seconds } = {}) {
        const entry = { id, body: JSON.stringify(job), v: "1" };
        if (seconds !== undefined) {
            entry.deadline = String((await this.#patiently(() => this.#nowMs())) + Math.round(1000 * seconds));
        }
        const shards = Number((await this.#patiently(() => this.redis.hGet(`${this.base}meta`, "shards"))) ?? 1);
        const stream = `${this.base}jobs:${priority}:${crc32(id) % shards}`;
        await this.#patiently(() => this.redis.xAdd(stream, "*", entry));
    }

    /** The text of the reply, each character once, whatever happens to a connection or to a worker. */
    async *stream(id) {
        const reader = await this.#connected(); // of its own: a blocking read holds up whatever comes behind it
        const reply = new Reply();
        let last = "0-0";
        try {
            while (!reply.ended) {
                let entries;
                try {
                    entries = await this.#read(reader, id, last);
                } catch (error) {
                    await this.#wait(error);
                    last = "0-0"; // another server may answer now: compare what it has with what was read
                    continue;
                }
                if (!entries) throw new Error("the job has ended and its reply is no longer kept");
                for (const entry of entries) {
                    last = entry.id; // the place to read on from
                    yield reply.add(JSON.parse(entry.message.d));
                }
            }
        } finally {
            reader.destroy();
        }
    }

    /** The entries behind `last`; waits a little for the first one. Null: there will be none. */
    async #read(reader, id, last) {
        const out = `${this.base}out:${id}`;
        const found = await reader.xRead({ key: out, id: last }, { COUNT: 100, BLOCK: BLOCK_MS });
        const state = found ?? (await reader.hGet(`${this.base}job:${id}`, "state"));
        const expired = state === "ended" && !(await reader.exists(out));
        this.#awaySince = null;
        return expired ? null : (found?.[0].messages ?? []);
    }

    /** Ask for the end of a job; its reply then ends with `done`. One that has ended is left alone. */
    async cancel(id) {
        const state = await this.#patiently(() => this.redis.hGet(`${this.base}job:${id}`, "state"));
        if (state === "ended") return;
        await this.#patiently(() => this.redis.set(`${this.base}cancel:${id}`, "1", { EX: 86400 }));
    }

    /** Redis' clock, which deadlines are measured by. */
    async #nowMs() {
        const [seconds, micros] = await this.redis.sendCommand(["TIME"]);
        return Number(seconds) * 1000 + Math.floor(Number(micros) / 1000);
    }

    /** Run a command that may be repeated until it works. */
    async #patiently(command) {
        for (;;) {
            try {
                const result = await command();
                this.#awaySince = null;
                return result;
            } catch (error) {
                await this.#wait(error);
            }
        }
    }

    /** Before the next try. Throws the error when it does not pass or Redis has been away for too long. */
    async #wait(error) {
        this.#awaySince ??= Date.now();
        if (!passes(error) || Date.now() - this.#awaySince > PATIENCE_MS) throw error;
        await sleep(PAUSE_MS);
    }
}

function numberOf(values, name) {
    const value = values[name];
    if (value !== undefined && !/^[0-9.]+$/.test(value)) throw new Error(`--${name}: a number expected, got ${value}`);
    return value === undefined ? undefined : Number(value);
}

async function main() {
    const options = {
        redis: { type: "string", default: "redis://localhost:6379/0" },
        queue: { type: "string", default: "default" },
        id: { type: "string", default: randomUUID() },
        "max-tokens": { type: "string", default: "64" },
        deadline: { type: "string" }, // seconds from now
    };
    const { values, positionals } = parseArgs({ options, allowPositionals: true });
    if (positionals.length !== 1) throw new Error('usage: node producer.mjs "a prompt" [--max-tokens 64] [--id a-name]');
    const producer = await new Producer(values.redis, values.queue).connect();
    try {
        const job = { prompt: positionals[0], max_tokens: numberOf(values, "max-tokens") };
        await producer.submit(job, values.id, { seconds: numberOf(values, "deadline") });
        process.once("SIGINT", () => producer.cancel(values.id).catch((error) => console.error(error.message)));
        for await (const text of producer.stream(values.id)) process.stdout.write(text);
        process.stdout.write("\n");
    } finally {
        producer.close();
    }
}

main().catch((error) => {
    console.error(error.message);
    process.exitCode = 1;
});
