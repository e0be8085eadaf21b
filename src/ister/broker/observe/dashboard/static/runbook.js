// What each check of the broker means, and what to do. The alarms are headings of
// docs/operations/alarms.md, which says more.

const c = (text) => ({ command: text });

export const RUNBOOK = {
  ready: {
    title: "Readiness",
    alarms: ["IsterNotReady"],
    meaning: "The broker runs but does not serve clients: it is recovering its topics, shutting down, or has lost its lease.",
    steps: ["Recovery takes time, and the number of open topics should grow. Clients retry meanwhile.", c("curl --silent 127.0.0.1:9040/ready")],
  },
  metadata: {
    title: "Metadata store",
    alarms: ["IsterMetadataDown"],
    meaning: "Open topics work until the lease expires; then messages are refused. Topics cannot be opened, uploaded or looked up.",
    steps: ["Check that etcd runs and can be reached, or that the disk of metadata.db is not full. The broker continues by itself.", c("ister config show")],
  },
  metadata_size: {
    title: "Size of etcd",
    alarms: ["IsterMetadataDown"],
    meaning: "etcd keeps every version of every key until it is compacted. At its quota it refuses all changes: topics cannot be opened or uploaded, and cursors are not written.",
    steps: ["Start all members with --auto-compaction-mode=periodic --auto-compaction-retention=1h, then defragment one after the other.", c("etcdctl endpoint status --write-out=table"), c("etcdctl defrag"), c("etcdctl alarm disarm")],
  },
  streams: {
    title: "Flight streams",
    alarms: ["IsterAppendsRefused"],
    meaning: "Producers and readers of ister.client use Flight streams, and their number is limited. At the limit, new ones are refused.",
    steps: ["Close clients that are not used, or raise the limit that the check names.", c("ister config show")],
  },
  lease: {
    title: "Lease",
    alarms: ["IsterLeaseLost"],
    meaning: "The broker cannot be sure that it owns its topics, so it refuses messages. Nothing acknowledged is lost.",
    steps: ["Bring the metadata store back: the broker renews the lease by itself.", "If a copy of this broker's directory replaced it, stop one of the two."],
  },
  uploads: {
    title: "Uploads",
    alarms: ["IsterUploadsFailing"],
    meaning: "Messages cannot be written to the bucket. They stay in local files meanwhile, and those are not trimmed.",
    steps: ["Check that the bucket exists and that the broker may write to it: storage.cloud.", c("ister topics describe TOPIC")],
  },
  upload_lag: {
    title: "Upload lag",
    alarms: ["IsterUploadLag", "IsterProducersHeldBack"],
    meaning: "Messages come faster than they are uploaded. At storage.uploader.max_lag_bytes producers are throttled.",
    steps: ["Look at the chart: a lag that grows needs a faster bucket or pipeline, one that falls clears by itself.", c("ister pipeline status")],
  },
  pipeline: {
    title: "Pipeline",
    alarms: ["IsterPipelineMissing"],
    meaning: "Without a pipeline nothing is merged, checked or exported; with storage.uploader.engine spark, nothing is uploaded.",
    steps: ["Start one, or set storage.uploader.engine to auto.", c("ister pipeline run")],
  },
  jobs: {
    title: "Jobs",
    alarms: ["IsterJobFailed", "IsterObjectsDamaged", "IsterScrubOverdue"],
    meaning: "The last run of a job failed. It is repeated by its schedule.",
    steps: ["The page Pipeline has the errors.", c("ister pipeline status")],
  },
  memory: {
    title: "Memory",
    alarms: ["IsterMemoryFull"],
    meaning: "Without a disk, messages wait in memory for their upload. When it is full, producers are throttled.",
    steps: ["Find out why uploads are slow, or raise storage.bucket.memory_max_bytes."],
  },
  disk: {
    title: "Disk",
    alarms: ["IsterDiskFull", "IsterDiskLow"],
    meaning: "On a full disk appends are refused; nothing acknowledged is lost, and writing resumes by itself.",
    steps: ["Free some space, or keep fewer local files: storage.wal.retention. Files that are not uploaded are kept, so look at uploads first.", c("df --human-readable .")],
  },
  syncs: {
    title: "Disk latency",
    alarms: ["IsterSlowSyncs"],
    meaning: "A sync of the log's disk took a second or more. Producers of these topics wait for it; others do not.",
    steps: ["Look for errors of the disk, and for other programs that use it.", c("dmesg | tail"), c("iostat -x 1")],
  },
  topics: {
    title: "Topics",
    alarms: ["IsterTopicNotWell", "IsterTopicNotOpened", "IsterDamage"],
    meaning: "A topic refuses messages because it is damaged, cannot be written, or cannot be opened.",
    steps: ["The page of the topic says what is wrong. Repair restores damaged parts from the bucket.", c("ister inspect TOPIC"), c("ister repair TOPIC")],
  },
  subscriptions: {
    title: "Subscriptions",
    alarms: ["IsterSubscriptionBlocked", "IsterDeadLetters"],
    meaning: "A message failed more often than the subscription's policy allows, and the policy is block: no new messages are sent. With key_shared, only that key is blocked.",
    steps: [
      "Fix the consumer, then seek to the offset: the message is delivered again.",
      "Or skip the message: seek to the offset behind it.",
      "Or change the failure policy: dead_letter keeps such messages in another topic, from where they can be requeued.",
      c("ister subscriptions policy TOPIC NAME --poison dead_letter --dead-letter-topic /default/orders-dead"),
    ],
  },
  certificate: {
    title: "Certificate",
    alarms: ["IsterCertificateEnds"],
    meaning: "Clients refuse an expired certificate.",
    steps: ["Replace broker.tls.cert_file and key_file. The broker reloads them without a restart."],
  },
  clock: {
    title: "Clock",
    alarms: ["IsterClock"],
    meaning: "The clock of the machine was set by a large step, or is not set. Deletion by age is suspended where it cannot be trusted.",
    steps: ["Correct the clock, and see that NTP or chrony runs. If the clock is right, confirm it:", c("curl --request POST --header 'X-Ister-Action: yes' --header 'Content-Type: application/json' --data '{}' 127.0.0.1:9040/api/clock/confirm")],
  },
  files: {
    title: "File descriptors",
    alarms: ["IsterFileDescriptors"],
    meaning: "Without descriptors clients cannot connect, and topics cannot be opened.",
    steps: ["Raise the limit (systemd: LimitNOFILE), or lower storage.wal.max_open_files."],
  },
  threads: {
    title: "Background threads",
    alarms: ["IsterThreadFailed"],
    meaning: "Unexpected errors in background threads are bugs in Ister.",
    steps: ["Restart the broker if a thread has ended, and report the traceback from its log."],
  },
};
